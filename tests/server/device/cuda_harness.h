// The serving core over one CUDA device: of the library that the test program is built for (the fake one), or else of
// the machine's GPU.
#ifndef SPMMD_TESTS_SERVER_DEVICE_CUDA_HARNESS_H_
#define SPMMD_TESTS_SERVER_DEVICE_CUDA_HARNESS_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/dispatch/cuda_library.h"
#include "server/device/cuda_device.h"
#include "tests/server/core/core_harness.h"

namespace spmmd::server::testing {

#ifdef SPMMD_FAKE_CUDA_LIBRARY
inline constexpr bool kFake = true;
#else
inline constexpr bool kFake = false;
#endif

inline std::string CudaLibraryPath() {
#ifdef SPMMD_FAKE_CUDA_LIBRARY
  return SPMMD_FAKE_CUDA_LIBRARY;
#else
  const char* path = std::getenv("SPMMD_CUDA_LIBRARY");
  return path == nullptr ? "" : path;
#endif
}

// The library with at least one GPU behind it, or why not.
inline absl::StatusOr<std::shared_ptr<const CudaLibrary>> UsableCuda() {
  auto library = CudaLibrary::Load(CudaLibraryPath());
  if (!library.ok()) return library.status();
  int32_t count = 0;
  if (const absl::Status status = (*library)->ToStatus((*library)->device_count(&count)); !status.ok()) return status;
  if (count == 0) return absl::NotFoundError("no GPU");
  return library;
}

class CudaCore {
 public:
  explicit CudaCore(const std::shared_ptr<const CudaLibrary>& library, DeviceOptions options = {},
                    Engine::Options engine_options = {}, const Residency::Options& residency = {})
      : device(*CudaDevice::Open(library, 0, options, &metrics)),
        catalog({.model_repository = "", .upload_limit_bytes = uint64_t{1} << 30, .residency = residency},
                {device.get()}, &metrics),
        engine(engine_options, &catalog, &metrics) {}

  absl::StatusOr<pb::Layer> Register(const pb::LayerSpec& spec, const DenseView& w,
                                     const std::vector<float>& bias = {}) {
    return RegisterIn(catalog, spec, w, bias);
  }
  absl::StatusOr<pb::Layer> Register(const std::string& name, const DenseView& w) {
    return Register(DenseSpec(name, w), w);
  }
  absl::Status Execute(const pb::ExecuteRequest& request, pb::ExecuteResponse* response) {
    return ExecuteOn(engine, request, response);
  }

  Metrics metrics{{.layer_label_cap = 1000, .bandwidth_window = absl::ZeroDuration()}};
  std::unique_ptr<CudaDevice> device;
  LayerCatalog catalog;
  Engine engine;
};

inline DeviceOptions Unmeasured() {
  DeviceOptions options;
  options.measure_bandwidth = false;
  return options;
}

class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto usable = UsableCuda();
    if (usable.ok()) {
      library_ = *std::move(usable);
    } else if (kFake || std::getenv("SPMMD_REQUIRE_GPU") != nullptr) {
      FAIL() << usable.status();
    } else {
      GTEST_SKIP() << usable.status();
    }
  }

  std::shared_ptr<const CudaLibrary> library_;
};

}  // namespace spmmd::server::testing

#endif  // SPMMD_TESTS_SERVER_DEVICE_CUDA_HARNESS_H_
