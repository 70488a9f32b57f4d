/* NVRTC: every program compiles, to nothing. */
#include <stddef.h>

int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return 0;
}

const char *nvrtcGetErrorString(int e) { return e ? "error" : "no error"; }
int nvrtcCreateProgram(void **out)
{
    static char program;
    *out = &program;
    return 0;
}

int nvrtcDestroyProgram(void **p)
{
    *p = NULL;
    return 0;
}

int nvrtcAddNameExpression(void *p, const char *name) { return 0; }
int nvrtcCompileProgram(void *p, int n, const char **options) { return 0; }
int nvrtcGetLoweredName(void *p, const char *name, const char **out)
{
    *out = name;
    return 0;
}

int nvrtcGetPTXSize(void *p, size_t *n)
{
    *n = 1;
    return 0;
}

int nvrtcGetPTX(void *p, char *out)
{
    *out = 0;
    return 0;
}

int nvrtcGetCUBINSize(void *p, size_t *n)
{
    *n = 1;
    return 0;
}

int nvrtcGetCUBIN(void *p, char *out)
{
    *out = 0;
    return 0;
}

int nvrtcGetProgramLogSize(void *p, size_t *n)
{
    *n = 1;
    return 0;
}

int nvrtcGetProgramLog(void *p, char *out)
{
    *out = 0;
    return 0;
}
