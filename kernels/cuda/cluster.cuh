// The PTX of thread block clusters: CTAs that run at the same time and write to each other's shared memory.
#ifndef SPMMD_KERNELS_CUDA_CLUSTER_CUH_
#define SPMMD_KERNELS_CUDA_CLUSTER_CUH_

#include <cstdint>

namespace spmmd::cuda {

// Barrier of all threads of the cluster, in two halves. It orders initialised barriers (BarrierInitFence), nothing
// else: an arrival that orders all memory waits for every load that is under way.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// An address in this CTA's shared memory -> the same place in that of CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t ClusterAddress(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// 16 bytes to another CTA; they count as transferred on that CTA's barrier when they are visible there.
__device__ __forceinline__ void ClusterStore128(uint32_t to, const float4& value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
               : "memory");
}

// Arrives at another CTA's barrier (an address from ClusterAddress); what this thread did before is seen after it.
__device__ __forceinline__ void BarrierArriveCluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// As BarrierWait, for what another CTA of the cluster wrote.
__device__ __forceinline__ void BarrierWaitCluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "WAIT:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      " @done bra DONE;\n bra WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace spmmd::cuda

#endif  // SPMMD_KERNELS_CUDA_CLUSTER_CUH_
