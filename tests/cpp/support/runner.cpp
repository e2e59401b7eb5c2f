// The Boost.Test framework and `main`, compiled once (7 s) and linked into every test program.
#define BOOST_TEST_MODULE torchreplay
#include <boost/test/included/unit_test.hpp>
