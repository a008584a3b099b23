// What the wire code makes of bytes against what protobuf makes of them.
#include "server/rpc/execute_wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/device/host_buffers.h"
#include "server/pb.h"
#include "server/rpc/execute_skim.h"

namespace spmmd::server {
namespace {

std::string RandomBytes(std::mt19937& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

pb::ExecuteRequest RandomRequest(std::mt19937& random) {
  pb::ExecuteRequest request;
  if (random() % 2 == 0) {
    request.set_program_id(std::string(random() % 200, 'p'));
  } else {
    request.mutable_program()->add_inputs("x");
    request.mutable_program()->add_steps()->set_name(std::string(random() % 300, 's'));
  }
  for (uint32_t i = random() % 4; i > 0; --i) {
    pb::NamedInput& input = *request.add_inputs();
    if (random() % 8 != 0) input.set_name(std::string(random() % 5, 'n'));
    pb::Tensor& tensor = *input.mutable_dense();
    tensor.set_dtype(static_cast<pb::DataType>(random() % 5));
    for (uint32_t d = random() % 4; d > 0; --d) tensor.add_shape(static_cast<int64_t>(random()) - (int64_t{1} << 31));
    switch (random() % 4) {
      case 0:
        tensor.mutable_region()->set_region("r");
        break;
      case 1:
        break;
      default:
        tensor.set_data(RandomBytes(random, random() % 600));
    }
  }
  if (random() % 2 == 0) request.set_priority(static_cast<pb::Priority>(random() % 5));
  if (random() % 4 == 0) request.add_outputs()->set_step("y");
  return request;
}

std::vector<absl::string_view> Slices(std::mt19937& random, const std::string& bytes) {
  std::vector<absl::string_view> slices;
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = random() % 5 == 0 ? 0 : 1 + random() % 100;
    slices.push_back(absl::string_view(bytes).substr(at, size));
    at += slices.back().size();
  }
  return slices;
}

// Puts back what was cut out.
bool Join(const SkimmedRequest& skimmed, pb::ExecuteRequest* out) {
  if (!out->ParseFromString(skimmed.rest)) return false;
  if (!skimmed.program.empty() && !out->mutable_program()->ParseFromString(skimmed.program)) return false;
  for (size_t i = 0; i < skimmed.inputs.size(); ++i) {
    if (!skimmed.inputs[i].present()) continue;
    std::string& data = *out->mutable_inputs(static_cast<int>(i))->mutable_dense()->mutable_data();
    EXPECT_EQ(data, "");
    for (const auto& piece : skimmed.inputs[i].pieces) {
      data.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    EXPECT_EQ(data.size(), skimmed.inputs[i].bytes);
  }
  return true;
}

TEST(SkimTest, TakesWhatSerialisersWrite) {
  std::mt19937 random(1);
  for (int run = 0; run < 2000; ++run) {
    const pb::ExecuteRequest request = RandomRequest(random);
    const uint64_t min_bytes = 1 + random() % 300;
    SkimmedRequest skimmed;
    pb::ExecuteRequest joined;
    std::string bytes;  // what the pieces point into
    if (random() % 2 == 0) {
      bytes = request.SerializeAsString();
      ASSERT_TRUE(SkimExecuteRequest(Slices(random, bytes), min_bytes, &skimmed));
    } else {
      pb::ExecuteStreamRequest whole;
      whole.set_request_id(uint64_t{random()} << (random() % 33));
      *whole.mutable_request() = request;
      bytes = whole.SerializeAsString();
      uint64_t id = 0;
      ASSERT_TRUE(SkimExecuteStreamRequest(Slices(random, bytes), min_bytes, &id, &skimmed));
      ASSERT_EQ(id, whole.request_id());
    }
    ASSERT_TRUE(Join(skimmed, &joined));
    ASSERT_EQ(joined.SerializeAsString(), request.SerializeAsString());
    for (int i = 0; i < request.inputs_size(); ++i) {
      const auto index = static_cast<size_t>(i);
      const bool cut = index < skimmed.inputs.size() && skimmed.inputs[index].present();
      ASSERT_EQ(cut, request.inputs(i).dense().data().size() >= min_bytes);
    }
  }
}

TEST(SkimTest, PiecesAreTheSlicesThemselves) {
  pb::ExecuteRequest request;
  request.set_program_id("p");
  request.add_inputs()->mutable_dense()->set_data(std::string(1000, 'x'));
  const std::string bytes = request.SerializeAsString();
  const std::vector<absl::string_view> slices = {absl::string_view(bytes).substr(0, 500),
                                                 absl::string_view(bytes).substr(500)};
  SkimmedRequest skimmed;
  ASSERT_TRUE(SkimExecuteRequest(slices, 1, &skimmed));
  ASSERT_EQ(skimmed.inputs.size(), 1);
  ASSERT_EQ(skimmed.inputs[0].pieces.size(), 2);
  EXPECT_EQ(static_cast<const void*>(skimmed.inputs[0].pieces[1].data()), bytes.data() + 500);
}

// Bytes with a few bits, lengths or pieces changed: where the skim takes them, they mean what protobuf says.
TEST(SkimTest, AgreesWithProtobufOnDamagedBytes) {
  std::mt19937 random(2);
  int taken = 0;
  int invalid = 0;
  for (int run = 0; run < 60000; ++run) {
    std::string bytes = RandomRequest(random).SerializeAsString();
    for (uint32_t change = random() % 3; change > 0 && !bytes.empty(); --change) {
      const size_t at = random() % std::min<size_t>(bytes.size(), random() % 2 == 0 ? 24 : bytes.size());
      switch (random() % 5) {
        case 0:
          bytes.erase(at, random() % 4);
          break;
        case 1:
          bytes.insert(at, RandomBytes(random, random() % 4));
          break;
        case 2:
          bytes += bytes.substr(at, random() % 40);
          break;
        default:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
      }
    }
    SkimmedRequest skimmed;
    if (!SkimExecuteRequest(Slices(random, bytes), 1 + random() % 300, &skimmed)) continue;
    pb::ExecuteRequest whole;
    pb::ExecuteRequest joined;
    const bool valid = whole.ParseFromString(bytes);
    ASSERT_EQ(Join(skimmed, &joined), valid) << run;
    if (valid) {
      ASSERT_EQ(joined.SerializeAsString(), whole.SerializeAsString()) << run;
    }
    ++taken;
    invalid += valid ? 0 : 1;
  }
  // Both happen, or this shows nothing.
  EXPECT_GT(taken, 10000);
  EXPECT_GT(invalid, 10);
}

TEST(SkimTest, LeavesMergesToProtobuf) {
  pb::ExecuteRequest request;
  request.set_program_id("p");
  const std::string target = request.SerializeAsString();
  pb::ExecuteRequest with_program;
  with_program.mutable_program()->add_inputs("x");
  const std::string program = with_program.SerializeAsString();
  for (const std::string& bytes : {target + program, program + target, program + program, target + target}) {
    SkimmedRequest skimmed;
    EXPECT_FALSE(SkimExecuteRequest({absl::string_view(bytes)}, 1, &skimmed));
  }
}

std::string Flatten(const grpc::ByteBuffer& bytes) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(bytes.Dump(&slices).ok());
  std::string all;
  for (const grpc::Slice& slice : slices) all.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return all;
}

TEST(SerializeTest, WritesWhatProtobufWouldWrite) {
  std::mt19937 random(3);
  const auto pool = HostBufferPool::Create({});
  for (int run = 0; run < 500; ++run) {
    pb::ExecuteResponse response;
    pb::ExecuteResponse whole;
    std::vector<HostBuffer> payloads;
    const uint32_t outputs = random() % 4;
    for (uint32_t o = 0; o < outputs; ++o) {
      pb::NamedOutput& output = *response.add_outputs();
      output.set_name(std::string(1 + random() % 5, 'y'));
      output.mutable_tensor()->set_dtype(static_cast<pb::DataType>(1 + random() % 3));
      output.mutable_tensor()->add_shape(random());
      output.mutable_tensor()->add_shape(random());
      pb::NamedOutput& expected = *whole.add_outputs();
      expected = output;
      HostBuffer payload;
      switch (random() % 3) {
        case 0:
          for (pb::NamedOutput* each : {&output, &expected}) each->mutable_tensor()->mutable_region()->set_region("r");
          break;
        case 1:
          for (pb::NamedOutput* each : {&output, &expected}) each->mutable_tensor()->set_data("small");
          break;
        default: {
          const std::string data = RandomBytes(random, 1 + random() % 100000);
          payload = pool->Take(data.size());
          std::memcpy(payload.data(), data.data(), data.size());
          output.mutable_tensor()->mutable_data();
          expected.mutable_tensor()->set_data(data);
        }
      }
      payloads.push_back(std::move(payload));
    }
    if (random() % 8 != 0) {
      for (pb::ExecuteResponse* each : {&response, &whole}) each->mutable_timing()->set_batch_tokens(7 + run);
    }
    pb::ExecuteStreamResponse in_stream;
    in_stream.set_request_id(random() % 3 == 0 ? 0 : random());
    *in_stream.mutable_response() = whole;
    if (random() % 2 == 0) {
      ASSERT_EQ(Flatten(SerializeExecuteResponse(response, std::move(payloads))), whole.SerializeAsString());
    } else {
      ASSERT_EQ(Flatten(SerializeExecuteStreamResponse(in_stream.request_id(), response, std::move(payloads))),
                in_stream.SerializeAsString());
    }
  }
}

TEST(SerializeTest, PayloadsAreNotCopiedAndComeBack) {
  const auto pool = HostBufferPool::Create({});
  HostBuffer payload = pool->Take(100000);
  const void* const data = payload.data();
  pb::ExecuteResponse response;
  response.add_outputs()->mutable_tensor()->mutable_data();
  std::vector<HostBuffer> payloads;
  payloads.push_back(std::move(payload));
  {
    const grpc::ByteBuffer bytes = SerializeExecuteResponse(response, std::move(payloads));
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(bytes.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 2);
    EXPECT_EQ(static_cast<const void*>(slices[1].begin()), data);
    EXPECT_EQ(pool->idle_bytes(), 0);
  }
  EXPECT_GE(pool->idle_bytes(), 100000);
}

}  // namespace
}  // namespace spmmd::server
