/* The driver's interface, as far as PyTorch asks for it by name (expandable segments) or links
 * against it (kernels compiled at run time). */
#include "device.h"

#include <stdlib.h>
#include <string.h>

CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    *out = ordinal;
    return ordinal < config()->n_devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device) == cudaSuccess
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    *out = (CUcontext)(uintptr_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out)
{
    *out = (CUcontext)(uintptr_t)(current_device() + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    if (context)
        cudaSetDevice((int)(uintptr_t)context - 1);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult e, const char **words)
{
    switch (e) {
    case CUDA_SUCCESS:
        *words = "no error";
        break;
    case CUDA_ERROR_OUT_OF_MEMORY:
        *words = "out of memory";
        break;
    case CUDA_ERROR_NOT_SUPPORTED:
        *words = "operation not supported";
        break;
    default:
        *words = "invalid argument";
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr p)
{
    enum kind kind;
    uintptr_t base;
    size_t size;
    int device = device_of((void *)p, &kind, &base, &size);
    if (device < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)out = device;
    else if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
        *(CUdeviceptr *)out = base;
    else if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
        *(size_t *)out = size;
    else
        return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

/* kernels compiled at run time: a module is nothing, a function of it too */
static char a_module, a_function;
CUresult cuModuleLoad(CUmodule *out, const char *name)
{
    *out = (CUmodule)&a_module;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
    *out = (CUmodule)&a_module;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned n, CUjit_option *options,
                            void **values)
{
    *out = (CUmodule)&a_module;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
    *out = (CUfunction)&a_function;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction f)
{
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 32;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value)
{
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared)
{
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, shared);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream, void **args,
                        void **extra)
{
    return work_on((cudaStream_t)stream, config()->kernel_us) == cudaSuccess
               ? CUDA_SUCCESS
               : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                   void **args)
{
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, args, NULL);
}

CUresult cuLinkCreate(unsigned n, CUjit_option *options, void **values, CUlinkState *out)
{
    *out = NULL;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuLinkAddData(CUlinkState s, CUjitInputType t, void *data, size_t size, const char *name,
                       unsigned n, CUjit_option *options, void **values)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuLinkComplete(CUlinkState s, void **out, size_t *size)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *p, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave i, CUtensorMapSwizzle s,
                                CUtensorMapL2promotion l, CUtensorMapFloatOOBfill f)
{
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

/* sharing handles with other processes: not here */
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle h,
                                      CUmemAllocationHandleType t, unsigned long long f)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *h,
                                        CUmemAllocationHandleType t)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *p)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out,
                                                CUmemGenericAllocationHandle h)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status)
{
    static const struct {
        const char *name;
        void *f;
    } table[] = {
#define ENTRY(f) { #f, (void *)f }
        ENTRY(cuDeviceGet),
        ENTRY(cuDeviceGetAttribute),
        ENTRY(cuMemAddressReserve),
        ENTRY(cuMemRelease),
        ENTRY(cuMemMap),
        ENTRY(cuMemAddressFree),
        ENTRY(cuMemSetAccess),
        ENTRY(cuMemUnmap),
        ENTRY(cuMemCreate),
        ENTRY(cuMemGetAllocationGranularity),
        ENTRY(cuMemExportToShareableHandle),
        ENTRY(cuMemImportFromShareableHandle),
        ENTRY(cuMemRetainAllocationHandle),
        ENTRY(cuMemGetAllocationPropertiesFromHandle),
        ENTRY(cuMemsetD32Async),
        ENTRY(cuGetErrorString),
        ENTRY(cuCtxGetCurrent),
        ENTRY(cuCtxSetCurrent),
        ENTRY(cuTensorMapEncodeTiled),
        ENTRY(cuPointerGetAttribute),
        ENTRY(cuDevicePrimaryCtxGetState),
        ENTRY(cuDevicePrimaryCtxRetain),
        ENTRY(cuMemGetAddressRange),
        ENTRY(cuStreamWriteValue32),
#undef ENTRY
    };
    *out = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name))
            *out = table[i].f;
    if (!*out)
        trace("the driver has no %s", name);
    if (status)
        *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
