// A Metal system in C, for what Python cannot do: buffers die on another thread, after their memory was read there.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct { void *isa; int flags, reserved; void (*invoke)(void *, void *, unsigned long); } Block;
typedef struct { atomic_long references; void *pointer; unsigned long nbytes; Block *block; } Object;

void *_NSConcreteGlobalBlock[32];
unsigned long standin_page, standin_limit;
int standin_interrupts;  // buffers die where they are released, and a Ctrl-C comes just before
atomic_long standin_live, standin_violations, standin_releases;
atomic_ulong standin_sum;
static long pending;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t settled = PTHREAD_COND_INITIALIZER;
static Object device = {1, 0, 0, 0}, any = {1, 0, 0, 0};

static void *die(void *argument) {  // the GPU has finished: it read all of the buffer, and lets go
    Object *buffer = argument;
    unsigned long sum = 0;
    for (unsigned long at = 0; at < buffer->nbytes; at++) sum += ((volatile uint8_t *)buffer->pointer)[at];
    standin_sum += sum;
    if (buffer->block) buffer->block->invoke(buffer->block, buffer->pointer, buffer->nbytes);
    else free(buffer->pointer);
    free(buffer);
    standin_live--;
    pthread_mutex_lock(&lock);
    pending--;
    pthread_cond_broadcast(&settled);
    pthread_mutex_unlock(&lock);
    return NULL;
}

void standin_interrupted(void (*call)(void *), void *argument) {  // a Ctrl-C comes just before a call
    raise(SIGINT);
    call(argument);
}

void standin_wait(void) {
    pthread_mutex_lock(&lock);
    while (pending) pthread_cond_wait(&settled, &lock);
    pthread_mutex_unlock(&lock);
}

static void release(Object *buffer);

long standin_release_and_wait(Object *buffer, long milliseconds) {  // how many are still not gone then
    struct timespec until;
    long left;
    release(buffer);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += milliseconds / 1000;
    until.tv_nsec += milliseconds % 1000 * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000, until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&lock);
    while (pending && !pthread_cond_timedwait(&settled, &lock, &until)) {}
    left = pending;
    pthread_mutex_unlock(&lock);
    return left;
}

int standin_translated;  // by Rosetta; -1: a Mac that never heard of it
int sysctlbyname(const char *name, void *value, size_t *nbytes, void *new_value, size_t new_nbytes) {
    if (strcmp(name, "sysctl.proc_translated") || *nbytes != sizeof(int) || new_value || new_nbytes) return -1;
    *(int *)value = standin_translated;
    return standin_translated < 0 ? -1 : 0;
}

static Object *held;
static long releases_before;
static void at_exit(void) {
    unsigned long nbytes = held->nbytes;
    die(held);
    printf("read %lu bytes, %ld releases since\n", nbytes, standin_releases - releases_before);
}

void standin_hold(Object *buffer) {  // another library holds it, until it is torn down after Python has ended
    held = buffer;
    releases_before = standin_releases + 1;  // that of whoever called this
    atexit(at_exit);
}

static Object *make(void *pointer, unsigned long nbytes, Block *block) {
    Object *buffer = malloc(sizeof *buffer);
    *buffer = (Object){1, pointer, nbytes, block};
    standin_live++;
    return buffer;
}

static void release(Object *buffer) {
    standin_releases++;
    if (buffer != &device && buffer != &any && --buffer->references == 0) {
        pthread_t thread;
        pthread_mutex_lock(&lock);
        pending++;
        pthread_mutex_unlock(&lock);
        if (standin_interrupts) {
            raise(SIGINT);
            die(buffer);
            return;
        }
        pthread_create(&thread, NULL, die, buffer);
        pthread_detach(thread);
    }
}

void *objc_getClass(const char *name) { (void)name; return &any; }
void *MTLCreateSystemDefaultDevice(void) { return &device; }
const char *sel_registerName(const char *name) { return strdup(name); }

uintptr_t objc_msgSend(Object *self, const char *selector, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d,
                       uintptr_t e) {
#define IS(name) (!strcmp(selector, name))
    if (IS("newBufferWithBytesNoCopy:length:options:deallocator:")) {
        Block *block = (Block *)d;
        if (a % standin_page || !b || b % standin_page || b > standin_limit || c || block->isa != _NSConcreteGlobalBlock ||
            block->flags != (1 << 28 | 1 << 30)) {
            standin_violations++;
            return 0;
        }
        return (uintptr_t)make((void *)a, b, block);
    }
    if (IS("newBufferWithLength:options:")) return (uintptr_t)make(malloc(a), a, NULL);
    if (IS("copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:"))
        memcpy((char *)((Object *)c)->pointer + d, (char *)((Object *)a)->pointer + b, e);
    if (IS("retain")) self->references++;
    if (IS("release")) release(self);
    if (IS("contents")) return (uintptr_t)self->pointer;
    if (IS("length")) return self->nbytes;
    if (IS("maxBufferLength")) return standin_limit;
    if (IS("recommendedMaxWorkingSetSize")) return UINTPTR_MAX;
    if (IS("hasUnifiedMemory")) return 1;
    if (IS("status")) return 4;
    if (IS("UTF8String")) return (uintptr_t) "Stand-in in C";
    return (uintptr_t)&any;
}
