#include "server/config/fields.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "google/protobuf/message.h"
#include "kernels/base/status_macros.h"
#include "server/config/options.h"

namespace spmmd::server {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Reflection;
using spmm::config::v1::FlagOptions;
using spmm::config::v1::ServerConfig;

absl::Status Bad(const FlagField& flag, absl::string_view text, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(flag.flag, ": '", text, "' ", why));
}

absl::Status CheckNumber(const FlagField& flag, double value) {
  const FlagOptions& options = *flag.options;
  // Negated so that NaN is refused.
  if (!(!options.has_min() || value >= options.min()) || !(!options.has_max() || value <= options.max())) {
    return Bad(flag, absl::StrFormat("%.15g", value),
               absl::StrFormat("is outside %.15g to %.15g", options.min(), options.max()));
  }
  return absl::OkStatus();
}

absl::Status CheckText(const FlagField& flag, const std::string& text) {
  const FlagOptions& options = *flag.options;
  if (options.choices_size() > 0 && std::ranges::find(options.choices(), text) == options.choices().end()) {
    return Bad(flag, text, absl::StrCat("is not one of ", absl::StrJoin(options.choices(), ", ")));
  }
  absl::Status status;
  if (options.value_type() == spmm::config::v1::VALUE_TYPE_DURATION) status = ParseDurationText(text).status();
  if (options.value_type() == spmm::config::v1::VALUE_TYPE_BYTES) status = ParseBytes(text).status();
  if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat(flag.flag, ": ", status.message()));
  return absl::OkStatus();
}

}  // namespace

const std::vector<FlagField>& FlagFields() {
  static const auto* const fields = [] {
    auto* list = new std::vector<FlagField>;
    const auto* descriptor = ServerConfig::descriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) {
      const FieldDescriptor* field = descriptor->field(i);
      if (!field->options().HasExtension(spmm::config::v1::flag)) continue;
      list->push_back({field, &field->options().GetExtension(spmm::config::v1::flag),
                       absl::StrCat("--", absl::StrReplaceAll(field->name(), {{"_", "-"}}))});
    }
    return list;
  }();
  return *fields;
}

absl::Status SetField(const FlagField& flag, const std::string& text, ServerConfig* config) {
  const Reflection* reflection = ServerConfig::GetReflection();
  switch (flag.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      if (flag.field->is_repeated()) {
        reflection->AddString(config, flag.field, text);
      } else {
        reflection->SetString(config, flag.field, text);
      }
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_BOOL: {
      bool value = false;
      if (!absl::SimpleAtob(text, &value)) return Bad(flag, text, "is not true or false");
      reflection->SetBool(config, flag.field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT32: {
      int32_t value = 0;
      if (!absl::SimpleAtoi(text, &value)) return Bad(flag, text, "is not a whole number");
      reflection->SetInt32(config, flag.field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      int64_t value = 0;
      if (!absl::SimpleAtoi(text, &value)) return Bad(flag, text, "is not a whole number");
      reflection->SetInt64(config, flag.field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      double value = 0;
      if (!absl::SimpleAtod(text, &value)) return Bad(flag, text, "is not a number");
      reflection->SetDouble(config, flag.field, value);
      return absl::OkStatus();
    }
    default:
      return absl::InternalError(absl::StrCat(flag.flag, ": no command line form for the field's type"));
  }
}

absl::Status FillDefaults(ServerConfig* config) {
  const Reflection* reflection = ServerConfig::GetReflection();
  for (const FlagField& flag : FlagFields()) {
    const bool set = flag.field->is_repeated() ? reflection->FieldSize(*config, flag.field) > 0
                                               : reflection->HasField(*config, flag.field);
    if (set || flag.options->default_value().empty()) continue;
    SPMMD_RETURN_IF_ERROR(SetField(flag, flag.options->default_value(), config));
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const ServerConfig& config) {
  const Reflection* reflection = ServerConfig::GetReflection();
  for (const FlagField& flag : FlagFields()) {
    if (flag.field->is_repeated() || !reflection->HasField(config, flag.field)) continue;
    switch (flag.field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_STRING:
        SPMMD_RETURN_IF_ERROR(CheckText(flag, reflection->GetString(config, flag.field)));
        break;
      case FieldDescriptor::CPPTYPE_INT32:
        SPMMD_RETURN_IF_ERROR(CheckNumber(flag, reflection->GetInt32(config, flag.field)));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        SPMMD_RETURN_IF_ERROR(CheckNumber(flag, static_cast<double>(reflection->GetInt64(config, flag.field))));
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        SPMMD_RETURN_IF_ERROR(CheckNumber(flag, reflection->GetDouble(config, flag.field)));
        break;
      default:
        break;
    }
  }
  return absl::OkStatus();
}

}  // namespace spmmd::server
