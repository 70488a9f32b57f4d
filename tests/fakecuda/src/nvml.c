/* NVML, as far as the message of an out-of-memory error asks: who uses the device (this process,
 * and no one else). */
#include "device.h"

#include <stdio.h>
#include <unistd.h>

struct process {
    unsigned pid;
    unsigned long long used;
};

int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = 13000;
    return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **out)
{
    unsigned domain, bus;
    char ours[32];
    for (int d = 0; sscanf(id, "%x:%x", &domain, &bus) == 2 && d < config()->n_devices; d++) {
        unsigned our_domain, our_bus;
        cudaDeviceGetPCIBusId(ours, sizeof ours, d);
        if (sscanf(ours, "%x:%x", &our_domain, &our_bus) == 2 && our_domain == domain &&
            our_bus == bus) {
            *out = (void *)(uintptr_t)(d + 1);
            return 0;
        }
    }
    return 6; /* not found */
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, struct process *out)
{
    if (*n < 1) {
        *n = 1;
        return 7; /* insufficient size */
    }
    *n = 1;
    out->pid = (unsigned)getpid();
    out->used = device_used_bytes((int)(uintptr_t)device - 1);
    return 0;
}

/* links between devices: none */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *out) { return 3; }

/* a fabric between machines: not supported, said in a structure whose state says so */
struct fabric {
    unsigned version;
    unsigned char uuid[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
};
int nvmlDeviceGetGpuFabricInfoV(void *device, struct fabric *out)
{
    out->state = 0;
    out->status = 0;
    return 0;
}
