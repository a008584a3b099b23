// Numbers and byte strings out of one fuzzer input, as LLVM's FuzzedDataProvider hands them out; own code because that
// header comes with clang alone, and the corpus is replayed with any compiler.
#ifndef SPMMD_TESTS_FUZZ_FUZZ_INPUT_H_
#define SPMMD_TESTS_FUZZ_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace spmmd::fuzz {

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  // Within [low, high]. Taken from the end, so that what decides the structure does not shift the bytes; low when
  // nothing is left.
  int64_t Integer(int64_t low, int64_t high) {
    const auto range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t value = 0;
    for (uint64_t left = range; left > 0 && size_ > 0; left >>= 8) value = value << 8 | data_[--size_];
    if (range != UINT64_MAX) value %= range + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(low) + value);
  }

  // `count` bytes from the front, zeros where the input ends.
  std::vector<uint8_t> Bytes(size_t count) {
    std::vector<uint8_t> bytes(count);
    const size_t taken = std::min(count, size_);
    if (taken > 0) std::memcpy(bytes.data(), data_, taken);
    data_ += taken;
    size_ -= taken;
    return bytes;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace spmmd::fuzz

#endif  // SPMMD_TESTS_FUZZ_FUZZ_INPUT_H_
