// libcuda.so.1 beside null.cpp: what Triton and Inductor ask of CUDA's driver.
#include <string.h>

#define API extern "C" __attribute__((visibility("default")))
API int cudaDeviceGetAttribute(int*, int, int) __attribute__((weak));
API int null_launch(const char*, unsigned, unsigned, unsigned, unsigned, size_t, void*) __attribute__((weak));
struct Launch { unsigned x, y, z, bx, by, bz, shared; void* stream; };

API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
API int cuDeviceGetAttribute(int* v, int a, int d) { return cudaDeviceGetAttribute ? cudaDeviceGetAttribute(v, a, d) : (*v = 0); }
API int cuDeviceGet(int* d, int i) { return *d = i, 0; }
API int cuDeviceGetCount(int* n) { return *n = 1, 0; }
API int cuCtxGetCurrent(void** c) { return *c = (void*)0x99, 0; }
API int cuGetErrorString(int, const char** s) { return *s = "an error of the null GPU", 0; }
API int cuModuleLoadData(void** m, const void* image) { return *m = (void*)image, 0; }
API int cuModuleGetFunction(void** f, void*, const char* name) { return *f = strdup(name), 0; }
API int cuFuncGetAttribute(int* v, int a, void*) { return *v = a == 0 ? 1024 : a == 4 ? 64 : 0, 0; }
API int cuLaunchKernelEx(const Launch* c, void* f, void**, void**) {
  return null_launch((const char*)f, c->x, c->y, c->z, c->bx * c->by * c->bz, c->shared, c->stream);
}
API int cuLaunchKernel(void* f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* s, void**, void**) {
  return null_launch((const char*)f, x, y, z, bx * by * bz, shared, s);
}
