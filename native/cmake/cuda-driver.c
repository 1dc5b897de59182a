// The functions of the driver's library that upstream's CUDA backend calls. Each calls the library's function, which it
// looks up at the call. So the backend links without a driver, and loads on machines without one.
#include <cuda.h>
#include <dlfcn.h>
#include <stddef.h>

// A driver that has been loaded stays, so there is nothing to close.
static void * function(const char * name) {
    void * driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver ? dlsym(driver, name) : NULL;
}

// Hidden, because a process may also link with a driver that has these names.
#define FORWARD(name, parameters, ...)                                                                                 \
    __attribute__((visibility("hidden"))) CUresult name parameters {                                                   \
        CUresult(*forward) parameters = (CUresult(*) parameters) function(#name);                                      \
        return forward ? forward(__VA_ARGS__) : CUDA_ERROR_NO_DEVICE;                                                  \
    }

FORWARD(cuDeviceGet, (CUdevice * device, int ordinal), device, ordinal)
FORWARD(cuDeviceGetAttribute, (int * value, CUdevice_attribute what, CUdevice device), value, what, device)
FORWARD(cuMemAddressFree, (CUdeviceptr address, size_t size), address, size)
FORWARD(cuMemAddressReserve,
        (CUdeviceptr * address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags), address,
        size, alignment, wanted, flags)
FORWARD(cuMemCreate,
        (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp * kind,
         unsigned long long flags),
        handle, size, kind, flags)
FORWARD(cuMemGetAllocationGranularity,
        (size_t * size, const CUmemAllocationProp * kind, CUmemAllocationGranularity_flags which), size, kind, which)
FORWARD(cuMemMap,
        (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
         unsigned long long flags),
        address, size, offset, handle, flags)
FORWARD(cuMemRelease, (CUmemGenericAllocationHandle handle), handle)
FORWARD(cuMemSetAccess, (CUdeviceptr address, size_t size, const CUmemAccessDesc * access, size_t count), address, size,
        access, count)
FORWARD(cuMemUnmap, (CUdeviceptr address, size_t size), address, size)

__attribute__((visibility("hidden"))) CUresult cuGetErrorString(CUresult error, const char ** text) {
    CUresult (*forward)(CUresult, const char **) = (CUresult (*)(CUresult, const char **)) function("cuGetErrorString");
    *text                                        = "there is no driver";
    return forward ? forward(error, text) : CUDA_SUCCESS;
}
