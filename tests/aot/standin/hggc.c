/* Stands in for libhggc.so: exports what the PPU's driver does, records each call, fails on demand. */
#define INIT hgInit
#define DRIVER_VERSION hgDriverGetVersion
#define DEVICE_COUNT hgDeviceGetCount
#define DEVICE_HANDLE hgDeviceGet
#define CONTEXT_RETAIN hgDevicePrimaryCtxRetain
#define CONTEXT_RELEASE hgDevicePrimaryCtxRelease_v2
#define CONTEXT_CURRENT hgCtxGetCurrent
#define CONTEXT_CHOOSE hgCtxSetCurrent
#define MODULE_LOAD hgModuleLoadData
#define MODULE_UNLOAD hgModuleUnload
#define MODULE_FUNCTION hgModuleGetFunction
#define LAUNCH hgLaunchKernel
#define ALLOC hgMemAllocAsync
#define FREE hgMemFreeAsync
#define ERROR_NAME hgGetErrorName
#define ERROR_STRING hgGetErrorString
#define ERRORS "HGGC_ERROR_"
#include "contexts.h"
