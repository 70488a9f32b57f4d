/* What the device says of itself: the shape of an H100 (SXM, 80 GB), as far as PyTorch's host code
 * reads it. */
#include "device.h"

#include <stdio.h>
#include <string.h>

static struct cudaDeviceProp properties(int device)
{
    struct cudaDeviceProp p;
    memset(&p, 0, sizeof p);
    strcpy(p.name, "NVIDIA H100 80GB HBM3 (fake)");
    memcpy(p.uuid.bytes, "fakecuda device", 15);
    p.uuid.bytes[15] = (char)device;
    p.totalGlobalMem = config()->total_bytes;
    p.sharedMemPerBlock = 48 << 10;
    p.regsPerBlock = 65536;
    p.warpSize = 32;
    p.memPitch = 2147483647;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 2147483647;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.totalConstMem = 64 << 10;
    p.major = 9;
    p.textureAlignment = 512;
    p.texturePitchAlignment = 32;
    p.multiProcessorCount = 132;
    p.canMapHostMemory = 1;
    p.surfaceAlignment = 512;
    p.concurrentKernels = 1;
    p.ECCEnabled = 1;
    p.pciBusID = 0x18 + device;
    p.asyncEngineCount = 3;
    p.unifiedAddressing = 1;
    p.memoryBusWidth = 5120;
    p.l2CacheSize = 50 << 20;
    p.persistingL2CacheMaxSize = 32 << 20;
    p.maxThreadsPerMultiProcessor = 2048;
    p.streamPrioritiesSupported = 1;
    p.globalL1CacheSupported = p.localL1CacheSupported = 1;
    p.sharedMemPerMultiprocessor = 228 << 10;
    p.regsPerMultiprocessor = 65536;
    p.managedMemory = 1;
    p.hostNativeAtomicSupported = 0;
    p.concurrentManagedAccess = 1;
    p.computePreemptionSupported = 1;
    p.canUseHostPointerForRegisteredMem = 1;
    p.cooperativeLaunch = 1;
    p.sharedMemPerBlockOptin = 227 << 10;
    p.maxBlocksPerMultiProcessor = 32;
    p.accessPolicyMaxWindowSize = 128 << 20;
    p.reservedSharedMemPerBlock = 1 << 10;
    p.hostRegisterSupported = 1;
    p.timelineSemaphoreInteropSupported = 1;
    p.memoryPoolsSupported = 1;
    p.clusterLaunch = 1;
    p.unifiedFunctionPointers = 1;
#if CUDART_VERSION >= 13000
    p.hostNumaId = -1;
#endif
    return p;
}

static bool valid(int device) { return device >= 0 && device < config()->n_devices; }

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = config()->n_devices;
    return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    if (!valid(device))
        return fail(cudaErrorInvalidDevice);
    *p = properties(device);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (!valid(device))
        return fail(cudaErrorInvalidDevice);
    struct cudaDeviceProp p = properties(device);
    const struct {
        int attribute, value;
    } known[] = {
        { cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock },
        { cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0] },
        { cudaDevAttrMaxBlockDimY, p.maxThreadsDim[1] },
        { cudaDevAttrMaxBlockDimZ, p.maxThreadsDim[2] },
        { cudaDevAttrMaxGridDimX, p.maxGridSize[0] },
        { cudaDevAttrMaxGridDimY, p.maxGridSize[1] },
        { cudaDevAttrMaxGridDimZ, p.maxGridSize[2] },
        { cudaDevAttrMaxSharedMemoryPerBlock, (int)p.sharedMemPerBlock },
        { cudaDevAttrTotalConstantMemory, (int)p.totalConstMem },
        { cudaDevAttrWarpSize, p.warpSize },
        { cudaDevAttrMaxPitch, (int)p.memPitch },
        { cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock },
        { cudaDevAttrClockRate, 1980000 },
        { cudaDevAttrMemoryClockRate, 2619000 },
        { cudaDevAttrTextureAlignment, (int)p.textureAlignment },
        { cudaDevAttrMultiProcessorCount, p.multiProcessorCount },
        { cudaDevAttrCanMapHostMemory, 1 },
        { cudaDevAttrConcurrentKernels, 1 },
        { cudaDevAttrPciBusId, p.pciBusID },
        { cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth },
        { cudaDevAttrL2CacheSize, p.l2CacheSize },
        { cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor },
        { cudaDevAttrAsyncEngineCount, p.asyncEngineCount },
        { cudaDevAttrUnifiedAddressing, 1 },
        { cudaDevAttrComputeCapabilityMajor, p.major },
        { cudaDevAttrComputeCapabilityMinor, p.minor },
        { cudaDevAttrStreamPrioritiesSupported, 1 },
        { cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)p.sharedMemPerMultiprocessor },
        { cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor },
        { cudaDevAttrManagedMemory, 1 },
        { cudaDevAttrConcurrentManagedAccess, 1 },
        { cudaDevAttrComputePreemptionSupported, 1 },
        { cudaDevAttrCanUseHostPointerForRegisteredMem, 1 },
        { cudaDevAttrCooperativeLaunch, 1 },
        { cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)p.sharedMemPerBlockOptin },
        { cudaDevAttrHostRegisterSupported, 1 },
        { cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor },
        { cudaDevAttrReservedSharedMemoryPerBlock, (int)p.reservedSharedMemPerBlock },
        { cudaDevAttrMemoryPoolsSupported, 1 },
        { cudaDevAttrClusterLaunch, 1 },
        { CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1 },
    };
    *value = 0; /* multicast, RDMA, fabric handles and the like are not here */
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute == (int)attribute)
            *value = known[i].value;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device)
{
    if (!valid(device))
        return fail(cudaErrorInvalidDevice);
    snprintf(id, (size_t)n, "0000:%02X:00.0", 0x18 + device);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (!valid(device) || !valid(peer))
        return fail(cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    static bool enabled[MAX_DEVICES][MAX_DEVICES];
    int device = current_device();
    if (!valid(peer) || peer == device)
        return fail(cudaErrorInvalidDevice);
    if (flags)
        return fail(cudaErrorInvalidValue);
    bool before = __atomic_exchange_n(&enabled[device][peer], true, __ATOMIC_RELAXED);
    return before ? fail(cudaErrorPeerAccessAlreadyEnabled) : cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 13000;
    return cudaSuccess;
}
