#include "server/version.h"

namespace spmmd::server {

const char* Version() { return SPMMD_VERSION; }
const char* Revision() { return SPMMD_REVISION; }

}  // namespace spmmd::server
