/* koila/device.h — a device profile: the numbers that a prediction needs of a GPU, each with its
 * origin and its possible error. It knows no graph.
 *
 *   koila_device_builtin("h100-80gb", NULL, &dev, &err);
 */
#ifndef KOILA_DEVICE_H
#define KOILA_DEVICE_H

#include "koila/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct koila_device koila_device; /* immutable once open, may be shared */

/* id, key in the file, what it is */
#define KOILA_DEVICE_FIELD_MAP(X)                                                                  \
    X(SM_COUNT, "sm_count", "streaming multiprocessors")                                           \
    X(CAPABILITY, "compute_capability", "10 * major + minor: 90 is sm_90")                         \
    X(TOTAL_BYTES, "total_bytes", "totalGlobalMem")                                                \
    X(INFO_TOTAL_BYTES, "info_total_bytes", "cudaMemGetInfo's total")                              \
    X(CONTEXT_BYTES, "context_bytes",                                                              \
      "CUDA context with lazy loading, kernels used by a training step included")                  \
    X(CUBLAS_BYTES, "cublas_workspace_bytes", "cuBLAS workspace, one for each thread and stream")  \
    X(CONV_BYTES, "conv_workspace_bytes",                                                          \
      "the largest convolution workspace; 0 without a spread: cuDNN asks for nothing at all")      \
    X(CUDNN, "cudnn_version",                                                                      \
      "10000 * major + 100 * minor + patch, as torch.backends.cudnn.version(); 0: not known")
typedef enum koila_device_field {
#define KOILA_DEVICE_FIELD_ENUM(id, key, text) KOILA_DEVICE_##id,
    KOILA_DEVICE_FIELD_MAP(KOILA_DEVICE_FIELD_ENUM)
#undef KOILA_DEVICE_FIELD_ENUM
        KOILA_N_DEVICE_FIELDS
} koila_device_field;

typedef struct koila_device_value {
    /** the real number is assumed to lie in value - spread .. value + spread */
    uint64_t value, spread;
    const char *how;  /**< "measured", "vendor" or "estimated"; borrowed from the device */
    const char *date; /**< "" if not said */
} koila_device_value;

/** A profile from JSON: {"koila_device": 1, "name": "...", "fields": {"total_bytes": {"value": n,
 * "how": "measured", "spread": n, "date": "..."}, ...}}. Required: sm_count, compute_capability,
 * total_bytes, context_bytes; the others are estimated if missing. On success `*out` is yours:
 * koila_device_free().
 * Expected: KOILA_BAD_INPUT (`e` names field and reason), KOILA_NO_MEMORY. */
KOILA_API koila_status koila_device_open(const char *json, size_t n, const koila_allocator *mem,
                                         koila_device **out, koila_error *e);
/** A built-in profile by name; case does not matter.
 * Expected: KOILA_BAD_ARGUMENT (`e` names the nearest). */
KOILA_API koila_status koila_device_builtin(const char *name, const koila_allocator *mem,
                                            koila_device **out, koila_error *e);
/** Names of the built-in profiles; NULL past the end. */
KOILA_API const char *koila_device_builtin_name(size_t i);
KOILA_API void koila_device_free(koila_device *d);
KOILA_API const char *koila_device_name(const koila_device *d);
KOILA_API koila_device_value koila_device_get(const koila_device *d, koila_device_field field);
KOILA_API const char *koila_device_field_key(koila_device_field field);
/** The bytes of a CUBLAS_WORKSPACE_CONFIG: every ":KiB:count" in it, added up. False when there is
 * none: torch then takes its default. */
KOILA_API bool koila_cublas_workspace(const char *config, uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
