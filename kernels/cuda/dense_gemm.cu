// SPDX-License-Identifier: Apache-2.0
// DenseGemm over cuBLASLt, every function of it found by name at run time; its header gives types only. cuBLASLt counts
// columns first: our row-major out [T, N] is its N x T, x is its K x T, and W [N, K] its K x N to be transposed.
// A bias of the output's type is added by the product itself, which saves a pass over the output.
// Sums that several blocks share are added in fp32 in the workspace, in a fixed order; the in-place scheme, whose order
// is nowhere promised, is not allowed.
#include "kernels/cuda/dense_gemm.cuh"

#include <cublasLt.h>
#include <dlfcn.h>

#include <unordered_map>

#include "kernels/cuda/launch.cuh"

namespace moelora {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr uint32_t kAlignment = 16;  // of every matrix, in bytes
constexpr size_t kMaxPlans = 4096;   // shapes remembered; then all are forgotten, since chunks have any length

// The functions used, under their names without the prefix.
struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;
};

template <class Function>
bool find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  return function != nullptr;
}

// Stays open for the life of the process: the library registers handlers with the driver.
bool open_library(Library& library) {
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    void* handle = dlopen(name, RTLD_LOCAL | RTLD_LAZY);
    if (handle != nullptr && find(handle, "cublasLtCreate", library.create) &&
        find(handle, "cublasLtDestroy", library.destroy) &&
        find(handle, "cublasLtMatmulDescCreate", library.desc_create) &&
        find(handle, "cublasLtMatmulDescDestroy", library.desc_destroy) &&
        find(handle, "cublasLtMatmulDescSetAttribute", library.desc_set) &&
        find(handle, "cublasLtMatrixLayoutCreate", library.layout_create) &&
        find(handle, "cublasLtMatrixLayoutDestroy", library.layout_destroy) &&
        find(handle, "cublasLtMatrixLayoutSetAttribute", library.layout_set) &&
        find(handle, "cublasLtMatmulPreferenceCreate", library.preference_create) &&
        find(handle, "cublasLtMatmulPreferenceDestroy", library.preference_destroy) &&
        find(handle, "cublasLtMatmulPreferenceSetAttribute", library.preference_set) &&
        find(handle, "cublasLtMatmulAlgoGetHeuristic", library.heuristic) &&
        find(handle, "cublasLtMatmul", library.matmul)) {
      return true;
    }
  }
  return false;
}

struct Shape {
  int64_t n = 0;
  int64_t k = 0;
  int64_t rows = 0;
  int64_t x_stride = 0;
  int64_t out_stride = 0;
  bool bf16_out = false;
  bool accumulate = false;
  bool bias = false;
  bool operator==(const Shape&) const = default;
};
struct ShapeHash {
  size_t operator()(const Shape& shape) const {
    uint64_t hash = shape.bf16_out * 4 + shape.accumulate * 2 + shape.bias;
    for (const int64_t value : {shape.n, shape.k, shape.rows, shape.x_stride, shape.out_stride}) {
      hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 29;
    }
    return static_cast<size_t>(hash);
  }
};
struct Plan {
  bool supported = false;
  cublasLtMatmulAlgo_t algo{};
};

// One instance serves one stream: its products share the workspace and the layouts.
class DenseGemmLt final : public DenseGemm {
 public:
  explicit DenseGemmLt(const Library& library) : library_(library) { plans_.reserve(kMaxPlans); }
  ~DenseGemmLt() override {
    if (preference_ != nullptr) {
      library_.preference_destroy(preference_);
    }
    for (cublasLtMatrixLayout_t layout : {weight_, x_, out_}) {
      if (layout != nullptr) {
        library_.layout_destroy(layout);
      }
    }
    for (cublasLtMatmulDesc_t desc : {plain_, biased_}) {
      if (desc != nullptr) {
        library_.desc_destroy(desc);
      }
    }
    if (handle_ != nullptr) {
      library_.destroy(handle_);
    }
    cudaFree(workspace_);
  }
  DenseGemmLt(const DenseGemmLt&) = delete;
  DenseGemmLt& operator=(const DenseGemmLt&) = delete;

  // False if the library refuses to work here.
  bool init() {
    if (library_.create(&handle_) != CUBLAS_STATUS_SUCCESS) {
      cudaGetLastError();
      return false;
    }
    const size_t workspace = kWorkspaceBytes;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const bool created = create_desc(&plain_, CUBLASLT_EPILOGUE_DEFAULT) &&
                         create_desc(&biased_, CUBLASLT_EPILOGUE_BIAS) &&
                         library_.layout_create(&weight_, CUDA_R_16BF, 1, 1, 1) == CUBLAS_STATUS_SUCCESS &&
                         library_.layout_create(&x_, CUDA_R_16BF, 1, 1, 1) == CUBLAS_STATUS_SUCCESS &&
                         library_.layout_create(&out_, CUDA_R_32F, 1, 1, 1) == CUBLAS_STATUS_SUCCESS &&
                         library_.preference_create(&preference_) == CUBLAS_STATUS_SUCCESS &&
                         prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace) &&
                         prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction) &&
                         prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment) &&
                         prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment) &&
                         prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment) &&
                         prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
    if (created) {
      check_cuda(cudaMalloc(&workspace_, kWorkspaceBytes), "workspace of cuBLASLt");
    }
    return created;
  }

  [[nodiscard]] Done run(const Weight& weight, const Weight& bias, const Rows& x, int32_t num_rows, const Rows& out,
                         bool accumulate, cudaStream_t stream) override {
    const bool aligned = is_aligned(weight.data) && is_aligned(x.data) && is_aligned(out.data);
    if (!aligned || weight.dtype != Dtype::kBf16 || x.dtype != Dtype::kBf16 || out.dtype == Dtype::kF16) {
      return Done::kNothing;
    }
    Shape shape{weight.rows, weight.cols, num_rows, x.stride, out.stride, out.dtype == Dtype::kBf16, accumulate, false};
    if (!set_layouts(shape)) {
      return Done::kNothing;
    }
    if (bias.data != nullptr && bias.dtype == out.dtype && is_aligned(bias.data)) {
      shape.bias = true;
      if (set(biased_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.data) &&
          multiply(shape, biased_, weight, x, out, stream)) {
        return Done::kProductAndBias;
      }
      shape.bias = false;
    }
    return multiply(shape, plain_, weight, x, out, stream) ? Done::kProduct : Done::kNothing;
  }

 private:
  bool multiply(const Shape& shape, cublasLtMatmulDesc_t desc, const Weight& weight, const Rows& x, const Rows& out,
                cudaStream_t stream) {
    const auto found = plans_.find(shape);
    const Plan plan = found != plans_.end() ? found->second : make_plan(shape, desc);
    if (!plan.supported) {
      return false;
    }
    const float one = 1.0f;
    const float beta = shape.accumulate ? 1.0f : 0.0f;
    return library_.matmul(handle_, desc, &one, weight.data, weight_, x.data, x_, &beta, out.data, out_, out.data, out_,
                           &plan.algo, workspace_, kWorkspaceBytes, stream) == CUBLAS_STATUS_SUCCESS;
  }
  static bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

  template <class Value>
  bool set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    return library_.desc_set(desc, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
  }
  bool create_desc(cublasLtMatmulDesc_t* desc, cublasLtEpilogue_t epilogue) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    return library_.desc_create(desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
           set(*desc, CUBLASLT_MATMUL_DESC_TRANSA, transposed) && set(*desc, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  }
  template <class Value>
  bool prefer(cublasLtMatmulPreferenceAttributes_t attribute, const Value& value) {
    return library_.preference_set(preference_, attribute, &value, sizeof value) == CUBLAS_STATUS_SUCCESS;
  }
  bool set_layout(cublasLtMatrixLayout_t layout, cudaDataType_t dtype, int64_t rows, int64_t cols, int64_t stride) {
    const auto type = static_cast<uint32_t>(dtype);
    const auto num_rows = static_cast<uint64_t>(rows);
    const auto num_cols = static_cast<uint64_t>(cols);
    return library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_TYPE, &type, sizeof type) == CUBLAS_STATUS_SUCCESS &&
           library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_ROWS, &num_rows, sizeof num_rows) ==
               CUBLAS_STATUS_SUCCESS &&
           library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_COLS, &num_cols, sizeof num_cols) ==
               CUBLAS_STATUS_SUCCESS &&
           library_.layout_set(layout, CUBLASLT_MATRIX_LAYOUT_LD, &stride, sizeof stride) == CUBLAS_STATUS_SUCCESS;
  }
  bool set_layouts(const Shape& shape) {
    return set_layout(weight_, CUDA_R_16BF, shape.k, shape.n, shape.k) &&
           set_layout(x_, CUDA_R_16BF, shape.k, shape.rows, shape.x_stride) &&
           set_layout(out_, shape.bf16_out ? CUDA_R_16BF : CUDA_R_32F, shape.n, shape.rows, shape.out_stride);
  }
  Plan make_plan(const Shape& shape, cublasLtMatmulDesc_t desc) {
    if (plans_.size() >= kMaxPlans) {
      plans_.clear();
    }
    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    const cublasStatus_t status =
        library_.heuristic(handle_, desc, weight_, x_, out_, out_, preference_, 1, &result, &count);
    Plan plan;
    plan.supported = status == CUBLAS_STATUS_SUCCESS && count == 1 && result.state == CUBLAS_STATUS_SUCCESS;
    plan.algo = result.algo;
    plans_.emplace(shape, plan);
    return plan;
  }

  Library library_;
  cublasLtHandle_t handle_ = nullptr;
  cublasLtMatmulDesc_t plain_ = nullptr;
  cublasLtMatmulDesc_t biased_ = nullptr;  // its bias is set before each product
  cublasLtMatrixLayout_t weight_ = nullptr;
  cublasLtMatrixLayout_t x_ = nullptr;
  cublasLtMatrixLayout_t out_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  void* workspace_ = nullptr;
  std::unordered_map<Shape, Plan, ShapeHash> plans_;
};

}  // namespace

std::unique_ptr<DenseGemm> DenseGemm::create() {
  Library library{};
  if (!open_library(library)) {
    return nullptr;
  }
  auto gemm = std::make_unique<DenseGemmLt>(library);
  if (!gemm->init()) {
    return nullptr;
  }
  return gemm;
}

}  // namespace moelora
