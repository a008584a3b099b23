// A stand-in for libnvidia-ml.so.1 with one GPU. FAKE_NVML names what fails: "init", "power", "ecc", "throttle".
#include <cstdlib>
#include <cstring>

namespace {

int gpu = 0;  // its address is the handle

bool Fails(const char* what) {
  const char* failing = std::getenv("FAKE_NVML");
  return failing != nullptr && std::strstr(failing, what) != nullptr;
}

constexpr int kNotSupported = 3;
constexpr int kNotFound = 6;

}  // namespace

extern "C" {

int nvmlInit_v2() { return Fails("init") ? 9 : 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  if (std::strcmp(uuid, "GPU-01234567-89ab-cdef-0123-456789abcdef") != 0) return kNotFound;
  *handle = &gpu;
  return 0;
}
int nvmlDeviceGetTemperature(void* handle, unsigned sensor, unsigned* value) {
  if (handle != &gpu || sensor != 0) return kNotSupported;
  *value = 61;
  return 0;
}
int nvmlDeviceGetPowerUsage(void* handle, unsigned* milliwatts) {
  if (handle != &gpu || Fails("power")) return kNotSupported;
  *milliwatts = 512'500;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void* handle, unsigned* milliwatts) {
  if (handle != &gpu || Fails("power")) return kNotSupported;
  *milliwatts = 700'000;
  return 0;
}
int nvmlDeviceGetClockInfo(void* handle, unsigned type, unsigned* megahertz) {
  if (handle != &gpu) return kNotSupported;
  *megahertz = type == 1 ? 1980 : 3201;
  return 0;
}
int nvmlDeviceGetUtilizationRates(void* handle, unsigned* rates) {
  if (handle != &gpu) return kNotSupported;
  rates[0] = 75;
  rates[1] = 33;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* handle, unsigned long long* memory) {
  if (handle != &gpu) return kNotSupported;
  memory[0] = 1000;
  memory[1] = 400;
  memory[2] = 600;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void* handle, unsigned type, unsigned counter, unsigned long long* count) {
  if (handle != &gpu || counter != 0 || Fails("ecc")) return kNotSupported;
  *count = type == 0 ? 7 : 2;
  return 0;
}
// nvmlDeviceGetCurrentClocksThrottleReasons is missing, as in a library of another version.

}  // extern "C"
