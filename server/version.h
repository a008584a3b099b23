// Set by the build.
#ifndef SPMMD_SERVER_VERSION_H_
#define SPMMD_SERVER_VERSION_H_

namespace spmmd::server {

// "0.1.0"
const char* Version();
// Source revision, or empty.
const char* Revision();

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_VERSION_H_
