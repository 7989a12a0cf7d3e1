/* Stands in for libmcruntime.so: exports what MACA's runtime does, records each call, fails on demand. */
#define INIT mcInit
#define DRIVER_VERSION mcDriverGetVersion
#define DEVICE_COUNT mcGetDeviceCount
#define DEVICE_CURRENT mcGetDevice
#define DEVICE_CHOOSE mcSetDevice
#define MODULE_LOAD mcModuleLoadData
#define MODULE_UNLOAD mcModuleUnload
#define MODULE_FUNCTION mcModuleGetFunction
#define LAUNCH mcModuleLaunchKernel
#define ALLOC mcMallocAsync
#define FREE mcFreeAsync
#define ERROR_NAME mcGetErrorName
#define ERROR_STRING mcGetErrorString
#define OUT_OF_MEMORY "mcErrorOutOfMemory"
#define ILLEGAL_ADDRESS "mcErrorIllegalAddress"
#include "devices.h"
