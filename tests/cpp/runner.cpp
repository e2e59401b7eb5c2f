// The Boost.Test framework, compiled once (7 s) and linked into every test binary; each of those defines
// BOOST_TEST_MODULE and includes <boost/test/unit_test.hpp>, which compiles in about 2 s.
#include <boost/test/included/unit_test.hpp>
