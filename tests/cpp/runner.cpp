// The Boost.Test framework and `main`, compiled once (7 s) and linked into every test binary. The header of the tests,
// <boost/test/unit_test.hpp>, is precompiled for each variant: it would take 2 s in every test.
#define BOOST_TEST_MODULE torchreplay
#include <boost/test/included/unit_test.hpp>
