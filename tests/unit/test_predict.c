#include "harness.h"
TEST(x) { CHECK(1); }
