// Writes the seeds of tests/fuzz/corpus: small valid inputs of every kind. Usage: make_corpus tests/fuzz/corpus
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "kernels/format/container.h"
#include "kernels/format/npy.h"
#include "kernels/format/packed_layer.h"
#include "tests/fuzz/layer_bytes.h"

namespace {

namespace fs = std::filesystem;

spmmd::DenseMatrix RandomMatrix(int64_t rows, int64_t cols, double density) {
  std::mt19937_64 random(static_cast<uint64_t>(rows * 1000 + cols));
  spmmd::DenseMatrix w = *spmmd::DenseMatrix::Create(spmmd::DType::kF16, rows, cols);
  auto* values = reinterpret_cast<uint16_t*>(w.mutable_view().data);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const double draw = static_cast<double>(random() % 1000) / 1000.0;
    if (draw < density) values[i] = static_cast<uint16_t>(0x3800 + random() % 0x400);
  }
  return w;
}

void Write(const fs::path& path, const std::string& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_corpus DIRECTORY\n");
    return 2;
  }
  const fs::path root = argv[1];
  for (int value = 1; value <= 16; ++value) {
    const auto format = static_cast<spmmd::Format>(value);
    if (!spmmd::IsValid(format)) continue;
    const std::string name(spmmd::Name(format));
    int seeds = 0;
    for (const auto& [rows, cols, density] :
         {std::tuple{3, 5, 0.5}, {20, 30, 0.5}, {70, 33, 0.1}, {9, 130, 0.9}, {520, 3, 0.5}}) {
      const auto layer = spmmd::Pack(format, RandomMatrix(rows, cols, density).view());
      if (!layer.ok()) continue;  // a format without a packer in this build
      const std::string file = name + "_" + std::to_string(rows) + "x" + std::to_string(cols);
      const std::string bytes = spmmd::fuzz::LayerToBytes(*layer);
      // Large seeds slow mutation down and teach nothing that small ones don't.
      constexpr size_t kMaxSeedBytes = 32768;
      if (bytes.size() <= kMaxSeedBytes) Write(root / "format" / file, bytes);
      // One file a format is enough for the container: they are padded to pages.
      if (seeds++ == 0) {
        fs::create_directories(root / "container");
        spmmd::LayerFile layer_file;
        layer_file.layer = *layer;
        layer_file.bias.assign(static_cast<size_t>(rows), 0.5f);
        layer_file.metadata = {{"source", "seed"}};
        if (!spmmd::WriteLayerFile((root / "container" / file).string(), layer_file).ok()) return 1;
      }
    }
  }
  fs::create_directories(root / "npy");
  if (!spmmd::WriteNpy((root / "npy" / "f16").string(), RandomMatrix(3, 4, 0.5).view()).ok()) return 1;
  const auto npy = [](const std::string& header, size_t data) {
    std::string out("\x93NUMPY\x01\x00", 8);
    out.push_back(static_cast<char>(header.size()));
    out.push_back('\0');
    return out + header + std::string(data, 'x');
  };
  Write(root / "npy" / "fortran", npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", 24));
  Write(root / "npy" / "vector_bf16", npy("{'descr': '<V2', 'fortran_order': False, 'shape': (5,), }", 10));
  Write(root / "npy" / "big_endian", npy("{'descr': '>f4', 'fortran_order': False, 'shape': (2, 3), }", 24));

  const auto safetensors = [](const std::string& header, size_t data) {
    const uint64_t size = header.size();
    return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + header + std::string(data, 'x');
  };
  Write(root / "safetensors" / "two",
        safetensors(R"({"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},)"
                    R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[12,16]}})",
                    16));
  Write(root / "safetensors" / "empty", safetensors("{}", 0));
  Write(root / "safetensors" / "scalar", safetensors(R"({"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]}})", 8));
  Write(
      root / "safetensors_index" / "two",
      R"({"metadata":{"total_size":16},"weight_map":{"a.weight":"model-00001-of-00002.safetensors","b":"x/y.safetensors"}})");
  Write(root / "safetensors_index" / "escape", R"({"weight_map":{"a":"../../etc/passwd","b":"/etc/passwd"}})");

  for (int encoding = 0; encoding < 5; ++encoding) {
    // FuzzInput takes integers from the end; plain noise of several lengths reaches all encodings.
    std::mt19937_64 random(static_cast<uint64_t>(encoding));
    std::string noise(static_cast<size_t>(50 + 150 * encoding), '\0');
    for (char& byte : noise) byte = static_cast<char>(random() % 3 == 0 ? random() : random() % 4);
    Write(root / "import" / ("noise_" + std::to_string(encoding)), noise);
  }
  return 0;
}
