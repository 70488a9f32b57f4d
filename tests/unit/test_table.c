#include "harness.h"
TEST(placeholder) {}
