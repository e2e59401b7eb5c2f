// The Boost.Test framework and `main`, compiled once (7 s) and linked into every test binary. Each test includes
// <boost/test/unit_test.hpp> first: it is precompiled for each variant, and would take 2 s in every test.
#define BOOST_TEST_MODULE torchreplay
#include <boost/test/included/unit_test.hpp>
