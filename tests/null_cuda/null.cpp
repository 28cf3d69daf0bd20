// A CUDA runtime, cuBLAS and NCCL that compute nothing, loaded before the real ones (LD_PRELOAD), so
// that torch's own host code runs where there is no GPU: its checks, its caching allocator, streams,
// events, ProcessGroupNCCL. Device memory is pages that nobody touches; numbers are zeros.
//
// NULL_CUDA_LOG=PREFIX   a line per event goes to PREFIX.PID
// NULL_CUDA_DEVICES=N, NULL_CUDA_CAPABILITY=90, NULL_CUDA_GB=80
// null_lag(N)            from now on the device is N launches behind the CPU
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#define API extern "C" __attribute__((visibility("default")))
#define LOCK std::lock_guard<std::recursive_mutex> locked(mutex)
#define NOTE(...)                                                \
  do {                                                           \
    LOCK;                                                        \
    if (FILE* note_ = log_file()) fprintf(note_, __VA_ARGS__);   \
  } while (0)

static std::recursive_mutex mutex;

static int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

static FILE* log_file() {
  static pid_t of = 0;  // ranks are forked
  static FILE* file = nullptr;
  const char* prefix = getenv("NULL_CUDA_LOG");
  if (prefix && of != getpid()) {
    of = getpid();
    file = fopen((std::string(prefix) + "." + std::to_string(of)).c_str(), "w");
    if (file) setvbuf(file, nullptr, _IOLBF, 0);
  }
  return file;
}

// -- devices ---------------------------------------------------------------------------------------
static thread_local int device = 0;
static thread_local cudaError_t last = cudaSuccess;
static int capability() { return setting("NULL_CUDA_CAPABILITY", 90); }
static size_t capacity() { return (size_t)setting("NULL_CUDA_GB", 80) << 30; }
static const int SHARED = 232448, PROCESSORS = 132;

API cudaError_t cudaGetDeviceCount(int* n) { return *n = setting("NULL_CUDA_DEVICES", 1), cudaSuccess; }
API cudaError_t cudaGetDevice(int* d) { return *d = device, cudaSuccess; }
API cudaError_t cudaSetDevice(int d) { return device = d, cudaSuccess; }
API cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) { return *v = 1, cudaSuccess; }

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "a GPU that computes nothing");
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = d + i;
  p->major = capability() / 10, p->minor = capability() % 10;
  p->totalGlobalMem = capacity(), p->l2CacheSize = 50 << 20, p->memoryBusWidth = 5120;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = SHARED, p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32, p->multiProcessorCount = PROCESSORS;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->textureAlignment = 512, p->asyncEngineCount = 3, p->pciBusID = d + 1;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *v = capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *v = capability() % 10; break;
    case cudaDevAttrMultiProcessorCount: *v = PROCESSORS; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = SHARED; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 233472; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrUnifiedAddressing: *v = 1; break;
    default: *v = 0;
  }
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int d) {
  return snprintf(s, n, "0000:%02x:00.0", d + 1), cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  if (least) *least = 0;
  if (most) *most = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  return *pool = (cudaMemPool_t)0x77, cudaSuccess;
}

// -- memory ----------------------------------------------------------------------------------------
struct Block {
  size_t bytes;
  bool host;
  int device;
};
static size_t used = 0;
static std::map<uintptr_t, Block>& blocks() {
  static auto* all = new std::map<uintptr_t, Block>;
  return *all;
}
static const Block* block_of(const void* p) {
  auto at = blocks().upper_bound((uintptr_t)p);
  if (at == blocks().begin()) return nullptr;
  --at;
  return (uintptr_t)p < at->first + at->second.bytes ? &at->second : nullptr;
}
static cudaError_t make(void** p, size_t n, bool host) {
  LOCK;
  size_t bytes = n ? (n + 4095) / 4096 * 4096 : 4096;
  *p = MAP_FAILED;
  if (host || used + bytes <= capacity())
    *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) return *p = nullptr, last = cudaErrorMemoryAllocation;
  blocks()[(uintptr_t)*p] = {bytes, host, device};
  if (!host) used += bytes;
  return cudaSuccess;
}
static cudaError_t drop(void* p) {
  LOCK;
  auto at = blocks().find((uintptr_t)p);
  if (at == blocks().end()) return cudaSuccess;
  if (!at->second.host) used -= at->second.bytes;
  munmap(p, at->second.bytes);
  blocks().erase(at);
  return cudaSuccess;
}
API cudaError_t cudaMalloc(void** p, size_t n) { return make(p, n, false); }
API cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return make(p, n, false); }
API cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { return make(p, n, true); }
API cudaError_t cudaFree(void* p) { return drop(p); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return drop(p); }
API cudaError_t cudaFreeHost(void* p) { return drop(p); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  LOCK;
  return *total = capacity(), *free = capacity() - used, cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  LOCK;
  memset(a, 0, sizeof *a);
  const Block* b = block_of(p);
  a->type = !b ? cudaMemoryTypeUnregistered : b->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = b ? b->device : -2;
  a->devicePointer = b ? (void*)p : nullptr;
  a->hostPointer = b && b->host ? (void*)p : nullptr;
  return cudaSuccess;
}

static const char* side(const void* p) {
  LOCK;
  const Block* b = block_of(p);
  return !b ? "pageable" : b->host ? "pinned" : "device";
}
// Small numbers do move, so that sizes and flags of programs hold.
static const size_t SMALL = 1 << 20;
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  NOTE("copy %s %s %zu stream %p src %p dst %p\n", side(from), side(to), n, s, from, to);
  if (n <= SMALL) memcpy(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, n, kind, nullptr);
}
API cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t s) {
  NOTE("memset %zu stream %p dst %p\n", n, s, to);
  if (n <= SMALL) memset(to, value, n);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* to, int value, size_t n) { return cudaMemsetAsync(to, value, n, nullptr); }

API cudaError_t cudaGetLastError() {
  auto error = last;
  return last = cudaSuccess, error;
}
API cudaError_t cudaPeekAtLastError() { return last; }
API const char* cudaGetErrorString(cudaError_t e) { return e ? "an error of the null GPU" : "no error"; }
API const char* cudaGetErrorName(cudaError_t e) { return e ? "nullCudaError" : "cudaSuccess"; }

// -- streams and events ----------------------------------------------------------------------------
static std::atomic<uintptr_t> names{0x1000};
static std::map<cudaStream_t, int> priorities;
static std::atomic<long> launches{0}, lag{0};
static std::unordered_map<cudaEvent_t, long> recorded;  // how many launches were before
static long caught_up = 0;                              // launches that the CPU has waited for

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int priority) {
  LOCK;
  return *s = (cudaStream_t)(names += 16), priorities[*s] = priority, cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t* s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return cudaStreamCreate(s); }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  LOCK;
  return *p = priorities.count(s) ? priorities[s] : 0, cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  LOCK;
  caught_up = launches;
  NOTE("SYNC stream %p\n", s);
  return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize() {
  LOCK;
  caught_up = launches;
  NOTE("SYNC device\n");
  return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  NOTE("wait stream %p event %p\n", s, e);
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  return *e = (cudaEvent_t)(names += 16), cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  LOCK;
  recorded[e] = launches;
  NOTE("record stream %p event %p\n", s, e);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  LOCK;
  if (recorded.count(e)) caught_up = std::max(caught_up, recorded[e]);
  NOTE("SYNC event %p\n", e);
  return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t e) {
  LOCK;
  auto at = recorded.find(e);
  bool done = at == recorded.end() || at->second <= std::max(caught_up, launches - lag);
  return done ? cudaSuccess : last = cudaErrorNotReady;
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1.0f, cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) {
  return *s = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id, cudaGraph_t*,
                                         const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* n) {
  *s = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* given) { return f(given), cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* given, unsigned) {
  return f(s, cudaSuccess, given), cudaSuccess;
}

// -- entries of the driver -------------------------------------------------------------------------
static long succeeds(...) { return 0; }
static int context_state(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}
static int attribute_of(int* v, int a, int d) { return cudaDeviceGetAttribute(v, (cudaDeviceAttr)a, d); }
static int device_of(int* v, int d) { return *v = d, 0; }
static int context(void** c) { return *c = (void*)0x99, 0; }
static int error_text(int, const char** s) { return *s = "an error of the null GPU", 0; }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                                 cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuDevicePrimaryCtxGetState", (void*)context_state}, {"cuDeviceGetAttribute", (void*)attribute_of},
      {"cuDeviceGet", (void*)device_of}, {"cuCtxGetCurrent", (void*)context}, {"cuGetErrorString", (void*)error_text}};
  *f = known.count(name) ? known.at(name) : (void*)succeeds;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// -- kernels ---------------------------------------------------------------------------------------
static std::unordered_map<const void*, std::string>& kernels() {
  static auto* all = new std::unordered_map<const void*, std::string>;
  return *all;
}
API int null_launch(const char* name, unsigned x, unsigned y, unsigned z, unsigned threads, size_t shared, void* stream) {
  launches++;
  NOTE("launch %s grid %u %u %u block %u shared %zu stream %p\n", name, x, y, z, threads, shared, stream);
  bool possible = x && y && z && y <= 65535 && z <= 65535 && threads <= 1024 && shared <= SHARED;
  if (!possible) NOTE("IMPOSSIBLE %s\n", name);
  return possible ? 0 : (last = cudaErrorInvalidConfiguration);
}
static cudaError_t launched(const void* f, dim3 g, dim3 b, size_t shared, cudaStream_t s) {
  LOCK;
  auto at = kernels().find(f);
  const char* name = at == kernels().end() ? "?" : at->second.c_str();
  return (cudaError_t)null_launch(name, g.x, g.y, g.z, b.x * b.y * b.z, shared, s);
}
API void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  LOCK;
  kernels()[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 0; }
API cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { return *k = (cudaKernel_t)f, cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) {
  return *n = 8, cudaSuccess;
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->ptxVersion = a->binaryVersion = capability();  // CUB asks for it
  return a->maxThreadsPerBlock = 1024, a->numRegs = 64, cudaSuccess;
}
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } pushed[8];
static thread_local int depth = 0;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  return pushed[depth++ & 7] = {grid, block, shared, stream}, 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto& top = pushed[--depth & 7];
  *grid = top.grid, *block = top.block, *shared = top.shared, *(void**)stream = top.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3 g, dim3 b, void**, size_t shared, cudaStream_t s) {
  return launched(f, g, b, shared, s);
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void**, size_t shared, cudaStream_t s) {
  return launched((const void*)f, g, b, shared, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) {
  return launched(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}

// -- NCCL: its header wants others that torch's wheels do not bring --------------------------------
typedef struct { char internal[128]; } ncclUniqueId;
struct Communicator { uint64_t name; int ranks, rank; };
static int nesting = 0;
static uint64_t name_of(const ncclUniqueId& id) {
  uint64_t name;
  return memcpy(&name, &id, 8), name;
}
static int communicator(void** made, uint64_t name, int ranks, int rank, const char* how) {
  NOTE("COMM %s %016lx ranks %d rank %d\n", how, name, ranks, rank);
  return *made = new Communicator{name, ranks, rank}, 0;
}
API int ncclGetVersion(int* v) { return *v = 23007, 0; }
API int ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  FILE* f = fopen("/dev/urandom", "r");
  bool read = fread(id, 8, 1, f) == 1;
  return fclose(f), read ? 0 : 2;
}
API int ncclCommInitRank(void** c, int n, ncclUniqueId id, int r) { return communicator(c, name_of(id), n, r, "init"); }
API int ncclCommInitRankConfig(void** c, int n, ncclUniqueId id, int r, void*) { return ncclCommInitRank(c, n, id, r); }
API int ncclCommInitRankScalable(void** c, int n, int r, int, ncclUniqueId* id, void*) { return ncclCommInitRank(c, n, *id, r); }
// All ranks of the parent split it at once: each says its colour in a file, and waits for the others'.
static int ranks_of(const Communicator* parent, int number, int color, int key) {
  char path[96];
  snprintf(path, sizeof path, "/dev/shm/null-nccl-%d-%016lx-%d", (int)getuid(), parent->name, number);
  int file = open(path, O_CREAT | O_RDWR | O_APPEND, 0600), said[2] = {color, key}, ranks = 0;
  if (write(file, said, sizeof said) != sizeof said) return 0;
  while (lseek(file, 0, SEEK_END) < (long)sizeof said * parent->ranks) usleep(1000);
  for (int i = 0; i < parent->ranks; i++)
    ranks += pread(file, said, sizeof said, i * sizeof said) == sizeof said && said[0] == color;
  if (write(file, "", 1) && lseek(file, 0, SEEK_END) == 9l * parent->ranks) unlink(path);  // the last
  return close(file), ranks;
}
API int ncclCommSplit(void* parent, int color, int key, void** c, void*) {
  LOCK;
  static std::map<uint64_t, int> splits;
  auto* of = (Communicator*)parent;
  int number = ++splits[of->name], ranks = ranks_of(of, number, color, key);
  uint64_t name = of->name * 1000003u + (uint64_t)color * 7919u + 1000000007ull * number;
  if (color < 0) return *c = nullptr, 0;
  return communicator(c, name, ranks, key, "split");
}
API int ncclCommCount(void* c, int* n) { return *n = ((Communicator*)c)->ranks, 0; }
API int ncclCommUserRank(void* c, int* r) { return *r = ((Communicator*)c)->rank, 0; }
API int ncclCommGetAsyncError(void*, int* e) { return *e = 0, 0; }
API const char* ncclGetErrorString(int) { return "an error of the null GPU"; }
API const char* ncclGetLastError(void*) { return ""; }
API int ncclMemAlloc(void** p, size_t n) { return make(p, n, false) ? 2 : 0; }
API int ncclGroupStart() {
  LOCK;
  if (!nesting++) NOTE("GROUP start\n");
  return 0;
}
API int ncclGroupEnd() {
  LOCK;
  if (!--nesting) NOTE("GROUP end\n");
  return 0;
}
static int moved(const char* what, const void* from, const void* to, size_t n, int type, int peer, void* c, void* s) {
  static const int WIDTH[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  auto* of = (Communicator*)c;
  size_t bytes = n * WIDTH[type];
  NOTE("NCCL %s comm %016lx rank %d peer %d bytes %zu src %p dst %p stream %p\n", what, of->name, of->rank, peer, bytes,
       from, to, s);
  for (const void* p : {from, to})
    if (p && n && strcmp(side(p), "device")) NOTE("NOWHERE %s %p\n", what, p);
  return 0;
}
API int ncclSend(const void* p, size_t n, int t, int peer, void* c, void* s) { return moved("send", p, 0, n, t, peer, c, s); }
API int ncclRecv(void* p, size_t n, int t, int peer, void* c, void* s) { return moved("recv", 0, p, n, t, peer, c, s); }
API int ncclAllReduce(const void* a, void* b, size_t n, int t, int, void* c, void* s) { return moved("allreduce", a, b, n, t, -1, c, s); }
API int ncclAllGather(const void* a, void* b, size_t n, int t, void* c, void* s) { return moved("allgather", a, b, n, t, -1, c, s); }
API int ncclReduceScatter(const void* a, void* b, size_t n, int t, int, void* c, void* s) { return moved("reducescatter", a, b, n, t, -1, c, s); }
API int ncclAlltoAll(const void* a, void* b, size_t n, int t, void* c, void* s) { return moved("alltoall", a, b, n, t, -1, c, s); }
API int ncclBroadcast(const void* a, void* b, size_t n, int t, int r, void* c, void* s) { return moved("broadcast", a, b, n, t, r, c, s); }
API int ncclBcast(void* a, size_t n, int t, int r, void* c, void* s) { return moved("broadcast", a, a, n, t, r, c, s); }
API int ncclReduce(const void* a, void* b, size_t n, int t, int, int r, void* c, void* s) { return moved("reduce", a, b, n, t, r, c, s); }

// -- cuBLAS ----------------------------------------------------------------------------------------
API int cublasCreate_v2(void** h) { return *h = (void*)0x55, 0; }
API int cublasGetMathMode(void*, int* m) { return *m = 0, 0; }
API int cublasGetPointerMode_v2(void*, int* m) { return *m = 0, 0; }
API int cublasLtCreate(void** h) { return *h = (void*)0x56, 0; }
API int cublasLtMatmulDescCreate(void** d, int, int) { return *d = malloc(8), 0; }
API int cublasLtMatmulDescDestroy(void* d) { return free(d), 0; }
API int cublasLtMatrixLayoutCreate(void** d, int, uint64_t, uint64_t, int64_t) { return *d = malloc(8), 0; }
API int cublasLtMatrixLayoutDestroy(void* d) { return free(d), 0; }
API int cublasLtMatmulPreferenceCreate(void** d) { return *d = malloc(8), 0; }
API int cublasLtMatmulPreferenceDestroy(void* d) { return free(d), 0; }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* result, int* n) {
  return memset(result, 0, 64), *n = 1, 0;
}
#define GEMM(name) \
  API int name(...) { return null_launch(#name, 1, 1, 1, 1, 0, nullptr); }
GEMM(cublasGemmEx)
GEMM(cublasGemmStridedBatchedEx)
GEMM(cublasSgemm_v2)
GEMM(cublasDgemm_v2)
GEMM(cublasSgemmStridedBatched)
GEMM(cublasDgemmStridedBatched)
GEMM(cublasLtMatmul)
GEMM(cublasSgemmEx)

// -- for tests -------------------------------------------------------------------------------------
API void null_mark(const char* text) { NOTE("mark %s\n", text); }
API void null_lag(long n) { lag = n; }
API long null_launches() { return launches; }
// torch.cuda.memory.CUDAPluggableAllocator: a tensor is a block, and its end is noted.
API void* null_malloc(ssize_t n, int, cudaStream_t s) {
  void* p;
  make(&p, n, false);
  NOTE("alloc %p %zd stream %p\n", p, n, s);
  return p;
}
API void null_free(void* p, ssize_t n, int, cudaStream_t s) {
  NOTE("free %p %zd stream %p\n", p, n, s);
  drop(p);
}
