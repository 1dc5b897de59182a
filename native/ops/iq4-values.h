// The values of the 16 codes of iq4_nl and iq4_xs, as a list for an initializer or an intrinsic: upstream's
// kvalues_iq4nl.
#pragma once

#define VELO_IQ4_VALUES -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
