// Included in front of upstream's chat formats: their warnings, which have a client's text, are not printed.
#pragma once

#include <cstdio>

#define fprintf(...) static_cast<void>(0)
