/* Stands in for CoreX's own libcuda.so.1: exports what a driver of CUDA 10.2 does, records each call, fails on
 * demand. */
#define INIT cuInit
#define DRIVER_VERSION cuDriverGetVersion
#define DEVICE_COUNT cuDeviceGetCount
#define DEVICE_HANDLE cuDeviceGet
#define CONTEXT_RETAIN cuDevicePrimaryCtxRetain
#define CONTEXT_RELEASE cuDevicePrimaryCtxRelease
#define CONTEXT_CURRENT cuCtxGetCurrent
#define CONTEXT_CHOOSE cuCtxSetCurrent
#define MODULE_LOAD cuModuleLoadData
#define MODULE_UNLOAD cuModuleUnload
#define MODULE_FUNCTION cuModuleGetFunction
#define LAUNCH cuLaunchKernel
#define ERROR_NAME cuGetErrorName
#define ERROR_STRING cuGetErrorString
#define ERRORS "CUDA_ERROR_"
#include "contexts.h"
