/* Stands in for libmusa.so: exports what MUSA's driver does, records each call, fails on demand. */
#define INIT muInit
#define DRIVER_VERSION muDriverGetVersion
#define DEVICE_COUNT muDeviceGetCount
#define DEVICE_HANDLE muDeviceGet
#define CONTEXT_RETAIN muDevicePrimaryCtxRetain
#define CONTEXT_RELEASE muDevicePrimaryCtxRelease_v2
#define CONTEXT_CURRENT muCtxGetCurrent
#define CONTEXT_CHOOSE muCtxSetCurrent
#define MODULE_LOAD muModuleLoadData
#define MODULE_UNLOAD muModuleUnload
#define MODULE_FUNCTION muModuleGetFunction
#define LAUNCH muLaunchKernel
#define ALLOC muMemAllocAsync
#define FREE muMemFreeAsync
#define ERROR_NAME muGetErrorName
#define ERROR_STRING muGetErrorString
#define ERRORS "MUSA_ERROR_"
#include "contexts.h"
