// The devices and their context: SOFT_CUDA_DEVICES GPUs (1), of which CUDA_VISIBLE_DEVICES may hide some. A process uses one of
// them; they differ in their identifier only.

#include "driver.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace soft;

namespace {

int primary_context;
thread_local void* current = nullptr;
int used = 0;

/// The numbers of the GPUs that the process sees. As in a real driver the list ends at the first one that does not exist.
std::vector<int> visible() {
    int there = static_cast<int>(setting("SOFT_CUDA_DEVICES", 1));
    std::vector<int> seen;
    const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int device = 0; device < there; device++) seen.push_back(device);
        return seen;
    }
    while (*text) {
        char* end;
        long device = std::strtol(text, &end, 10);
        if (end == text || device < 0 || device >= there) break;
        seen.push_back(static_cast<int>(device));
        text = *end == ',' ? end + 1 : end;
        if (*end && *end != ',') break;
    }
    return seen;
}

}  // namespace

int soft::used_device() { return used; }

extern "C" {

int cuInit(unsigned) { return visible().empty() ? NO_DEVICE : SUCCESS; }

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}

int cuDeviceGetCount(int* count) {
    *count = static_cast<int>(visible().size());
    return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) {
    std::vector<int> seen = visible();
    if (ordinal < 0 || ordinal >= static_cast<int>(seen.size())) return INVALID_DEVICE;
    *device = seen[static_cast<size_t>(ordinal)];
    return SUCCESS;
}

int cuDeviceGetUuid(void* uuid, int device) {
    char text[16] = "software GPU";
    text[15] = static_cast<char>(device);
    std::memcpy(uuid, text, sizeof text);
    return SUCCESS;
}

int cuDeviceGetUuid_v2(void* uuid, int device) { return cuDeviceGetUuid(uuid, device); }

int cuDeviceGetName(char* name, int length, int) {
    std::snprintf(name, static_cast<size_t>(length), "software CUDA driver");
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    int sm = static_cast<int>(setting("SOFT_CUDA_SM", 80));
    switch (attribute) {
        case 16: *value = 108; return SUCCESS;      // multiprocessors
        case 75: *value = sm / 10; return SUCCESS;  // compute capability
        case 76: *value = sm % 10; return SUCCESS;
        // Shared memory of a multiprocessor: one KiB more than a block may have.
        case 81: *value = static_cast<int>(largest_shared()) + (1 << 10); return SUCCESS;
        case 115: *value = static_cast<int>(setting("SOFT_CUDA_POOLS", 1)); return SUCCESS;  // memory pools
        default: return refuse(INVALID_VALUE, "cuDeviceGetAttribute: attribute %d is not implemented", attribute);
    }
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    used = device;
    *context = &primary_context;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

int cuCtxGetCurrent(void** context) {
    *context = current;
    return SUCCESS;
}

int cuCtxSetCurrent(void* context) {
    current = context;
    return SUCCESS;
}

int cuCtxSynchronize() {
    SOFT_CALL;
    if (!current) return refuse(INVALID_CONTEXT, "cuCtxSynchronize: this thread has no context");
    for (auto& stream : streams())
        if (stream->capture) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "cuCtxSynchronize");
    count("wait of the host", "cuCtxSynchronize", 0);
    synchronize_all();
    return failure();
}

int cuCtxDestroy_v2(void*) { return refuse(NOT_SUPPORTED, "cuCtxDestroy is not implemented"); }

int cuMemcpyPeerAsync(uint64_t, void*, uint64_t, void*, size_t, void*) {
    return refuse(NOT_SUPPORTED, "cuMemcpyPeerAsync is not implemented: there is one device");
}

static const char* name_of(int code) {
    switch (code) {
        case SUCCESS: return "CUDA_SUCCESS";
        case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
        case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
        case NO_DEVICE: return "CUDA_ERROR_NO_DEVICE";
        case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
        case INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
        case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
        case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
        case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
        case NOT_READY: return "CUDA_ERROR_NOT_READY";
        case ILLEGAL_ADDRESS: return "CUDA_ERROR_ILLEGAL_ADDRESS";
        case ALREADY_REGISTERED: return "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
        case NOT_REGISTERED: return "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
        case NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
        case ILLEGAL_STATE: return "CUDA_ERROR_ILLEGAL_STATE";
        case CAPTURE_UNSUPPORTED: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        case CAPTURE_INVALIDATED: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
        case CAPTURE_MERGE: return "CUDA_ERROR_STREAM_CAPTURE_MERGE";
        case CAPTURE_UNMATCHED: return "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
        case CAPTURE_UNJOINED: return "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
        case CAPTURE_ISOLATION: return "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
        case CAPTURE_IMPLICIT: return "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
        case CAPTURED_EVENT: return "CUDA_ERROR_CAPTURED_EVENT";
        case CAPTURE_WRONG_THREAD: return "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
        default: return nullptr;
    }
}

int cuGetErrorName(int code, const char** text) {
    *text = name_of(code);
    return *text ? SUCCESS : INVALID_VALUE;
}

int cuGetErrorString(int code, const char** text) { return cuGetErrorName(code, text); }

}  // extern "C"
