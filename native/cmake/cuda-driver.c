// The functions of the driver's library that upstream's CUDA backend calls, for machines that build without a driver:
// linked with, never installed and never run.
typedef int result;

#define FUNCTION(name)                                                                                                 \
    __attribute__((visibility("default"))) result name(void);                                                          \
    result                                        name(void) { return 100; /* CUDA_ERROR_NO_DEVICE */ }

FUNCTION(cuDeviceGet)
FUNCTION(cuDeviceGetAttribute)
FUNCTION(cuGetErrorString)
FUNCTION(cuMemAddressFree)
FUNCTION(cuMemAddressReserve)
FUNCTION(cuMemCreate)
FUNCTION(cuMemGetAllocationGranularity)
FUNCTION(cuMemMap)
FUNCTION(cuMemRelease)
FUNCTION(cuMemSetAccess)
FUNCTION(cuMemUnmap)
