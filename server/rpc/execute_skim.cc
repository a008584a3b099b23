#include "server/rpc/execute_skim.h"

#include <optional>
#include <utility>

namespace spmmd::server {

namespace wire {

void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

void AppendField(uint32_t field, absl::string_view bytes, std::string* out) {
  AppendVarint(Tag(field, kBytes), out);
  AppendVarint(bytes.size(), out);
  out->append(bytes.data(), bytes.size());
}

}  // namespace wire

namespace {

using wire::AppendField;
using wire::AppendVarint;
using wire::kBytes;
using wire::kVarint;
using wire::Tag;

// Reads bytes that lie in slices. What it does not understand, or what is not there, is a nullopt or false.
class Reader {
 public:
  explicit Reader(absl::Span<const absl::string_view> slices) : slices_(slices) {
    for (const absl::string_view slice : slices) left_ += slice.size();
  }

  uint64_t left() const { return left_; }

  std::optional<uint64_t> Varint() { return Varint(10); }
  // Protobuf takes tags and lengths of five bytes at most, however many of them are padding.
  std::optional<uint64_t> ReadTag() { return Varint(5); }
  // The length of a field, which the bytes left contain.
  std::optional<uint64_t> Length() {
    const std::optional<uint64_t> length = Varint(5);
    return length.has_value() && *length <= left_ ? length : std::nullopt;
  }

  // The next `count` <= left() bytes.
  void Append(uint64_t count, std::string* out) {
    while (count > 0) {
      const absl::string_view chunk = Chunk(count);
      out->append(chunk.data(), chunk.size());
      count -= chunk.size();
    }
  }
  void Pieces(uint64_t count, Payloads::Input* out) {
    out->bytes = count;
    while (count > 0) {
      const absl::string_view chunk = Chunk(count);
      out->pieces.emplace_back(reinterpret_cast<const std::byte*>(chunk.data()), chunk.size());
      count -= chunk.size();
    }
  }

 private:
  std::optional<uint64_t> Varint(int max_bytes) {
    uint64_t value = 0;
    for (int i = 0; i < max_bytes && left_ > 0; ++i) {
      const auto byte = static_cast<uint8_t>(Chunk(1).front());
      if (i == 9 && byte > 1) return std::nullopt;
      value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }
  // Some of the next bytes, at most `most` > 0; there are some.
  absl::string_view Chunk(uint64_t most) {
    while (at_ == slices_[slice_].size()) {
      ++slice_;
      at_ = 0;
    }
    const absl::string_view chunk = slices_[slice_].substr(at_, most);
    at_ += chunk.size();
    left_ -= chunk.size();
    return chunk;
  }

  const absl::Span<const absl::string_view> slices_;
  size_t slice_ = 0;
  size_t at_ = 0;
  uint64_t left_ = 0;
};

// Copies the field whose tag was read. It has to end with the message, `end` bytes before the reader's.
bool CopyField(uint64_t tag, uint64_t end, Reader* in, std::string* out) {
  AppendVarint(tag, out);
  if ((tag & 7) == kVarint) {
    const std::optional<uint64_t> value = in->Varint();
    if (!value.has_value() || in->left() < end) return false;
    AppendVarint(*value, out);
    return true;
  }
  const std::optional<uint64_t> length = in->Length();
  if (!length.has_value() || in->left() < end + *length) return false;
  AppendVarint(*length, out);
  in->Append(*length, out);
  return true;
}

// A message inside another: the length is read, the message itself is not. False when it does not fit.
bool Enter(uint64_t end, Reader* in, uint64_t* inner_end) {
  const std::optional<uint64_t> length = in->Length();
  if (!length.has_value() || in->left() < end + *length) return false;
  *inner_end = in->left() - *length;
  return true;
}

// A Tensor up to `end` bytes before the reader's end.
bool SkimTensor(uint64_t end, uint64_t min_bytes, Reader* in, std::string* out, Payloads::Input* payload) {
  bool content = false;
  while (in->left() > end) {
    const std::optional<uint64_t> tag = in->ReadTag();
    if (!tag.has_value() || in->left() < end) return false;
    switch (*tag) {
      case Tag(1, kVarint):  // dtype
      case Tag(2, kVarint):  // shape, element by element
      case Tag(2, kBytes):   // shape, packed
        if (!CopyField(*tag, end, in, out)) return false;
        break;
      case Tag(3, kBytes): {  // data
        if (content) return false;
        content = true;
        const std::optional<uint64_t> length = in->Length();
        if (!length.has_value() || in->left() < end + *length) return false;
        AppendVarint(*tag, out);
        if (*length < min_bytes) {
          AppendVarint(*length, out);
          in->Append(*length, out);
        } else {
          AppendVarint(0, out);
          in->Pieces(*length, payload);
        }
        break;
      }
      case Tag(4, kBytes):  // region
        if (content) return false;
        content = true;
        if (!CopyField(*tag, end, in, out)) return false;
        break;
      default:
        return false;
    }
  }
  return in->left() == end;
}

bool SkimInput(uint64_t end, uint64_t min_bytes, Reader* in, std::string* out, Payloads::Input* payload) {
  bool value = false;
  while (in->left() > end) {
    const std::optional<uint64_t> tag = in->ReadTag();
    if (!tag.has_value() || in->left() < end) return false;
    if (*tag == Tag(2, kBytes)) {  // dense
      uint64_t tensor_end = 0;
      std::string tensor;
      if (value || !Enter(end, in, &tensor_end) || !SkimTensor(tensor_end, min_bytes, in, &tensor, payload))
        return false;
      AppendField(2, tensor, out);
      value = true;
    } else if (*tag == Tag(1, kBytes)) {  // name
      if (!CopyField(*tag, end, in, out)) return false;
    } else {
      return false;  // sparse tensors too: the engine widens their values, so that they are copied anyway
    }
  }
  return in->left() == end;
}

// An ExecuteRequest up to `end` bytes before the reader's end.
bool SkimRequest(uint64_t end, uint64_t min_bytes, Reader* in, SkimmedRequest* out) {
  bool target = false;
  size_t inputs = 0;
  while (in->left() > end) {
    const std::optional<uint64_t> tag = in->ReadTag();
    if (!tag.has_value() || in->left() < end) return false;
    switch (*tag) {
      case Tag(1, kBytes): {  // program
        const std::optional<uint64_t> length = in->Length();
        if (target || !length.has_value() || *length == 0 || in->left() < end + *length) return false;
        in->Append(*length, &out->program);
        target = true;
        break;
      }
      case Tag(2, kBytes):  // program_id
        if (target || !CopyField(*tag, end, in, &out->rest)) return false;
        target = true;
        break;
      case Tag(3, kBytes): {  // inputs
        uint64_t input_end = 0;
        std::string input;
        Payloads::Input payload;
        if (!Enter(end, in, &input_end) || !SkimInput(input_end, min_bytes, in, &input, &payload)) return false;
        AppendField(3, input, &out->rest);
        if (payload.present()) {
          out->inputs.resize(inputs + 1);
          out->inputs[inputs] = std::move(payload);
        }
        ++inputs;
        break;
      }
      case Tag(4, kBytes):   // outputs
      case Tag(5, kVarint):  // priority
        if (!CopyField(*tag, end, in, &out->rest)) return false;
        break;
      default:
        return false;
    }
  }
  return in->left() == end;
}

}  // namespace

bool SkimExecuteRequest(absl::Span<const absl::string_view> slices, uint64_t min_bytes, SkimmedRequest* out) {
  Reader in(slices);
  return SkimRequest(/*end=*/0, min_bytes, &in, out);
}

bool SkimExecuteStreamRequest(absl::Span<const absl::string_view> slices, uint64_t min_bytes, uint64_t* request_id,
                              SkimmedRequest* out) {
  Reader in(slices);
  *request_id = 0;
  bool request = false;
  while (in.left() > 0) {
    const std::optional<uint64_t> tag = in.ReadTag();
    if (tag == Tag(1, kVarint)) {
      const std::optional<uint64_t> id = in.Varint();
      if (!id.has_value()) return false;
      *request_id = *id;
    } else if (tag == Tag(2, kBytes)) {
      uint64_t end = 0;
      if (request || !Enter(/*end=*/0, &in, &end) || !SkimRequest(end, min_bytes, &in, out)) return false;
      request = true;
    } else {
      return false;
    }
  }
  return request;
}

}  // namespace spmmd::server
