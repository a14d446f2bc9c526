/* Lets user-mode Linux 6.1 run on processors with AMX.
 *
 * It keeps 2696 bytes of a task's floating-point state, up to AVX-512, and hands them back with
 * PTRACE_SETREGSET. A kernel that knows larger states refuses a part (EFAULT) and init dies. Preloaded, this
 * gives it the whole: what was kept, and the rest at rest. No headers: any C compiler will do.
 */
struct iovec { char *base; unsigned long length; };

extern void *dlsym(void *handle, const char *name);

#define NEXT ((void *)-1L)
enum { GETREGSET = 0x4204, SETREGSET = 0x4205, XSTATE = 0x202 };
enum { HEADER = 512, KEPT = 0xff }; /* the header's bitmap; its bits up to AVX-512 */

static long (*next)(long request, long pid, unsigned long address, void *data);
static char whole[1 << 16];
static unsigned long size;

static long measure(long pid)
{
    static char scratch[sizeof whole];
    struct iovec all = { scratch, sizeof scratch };
    long answer = next(GETREGSET, pid, XSTATE, &all);
    if (answer == 0)
        size = all.length;
    return answer;
}

static long set(long pid, struct iovec *part)
{
    struct iovec all = { whole, size };
    if (size == 0 && measure(pid) < 0)
        return -1;
    if (part->length >= size)
        return next(SETREGSET, pid, XSTATE, part);
    for (unsigned long i = 0; i < part->length; i++)
        whole[i] = part->base[i];
    *(unsigned long *)(whole + HEADER) &= KEPT;
    all.length = size;
    return next(SETREGSET, pid, XSTATE, &all);
}

long ptrace(long request, long pid, unsigned long address, void *data)
{
    if (!next)
        next = dlsym(NEXT, "ptrace");
    if (request == SETREGSET && address == XSTATE)
        return set(pid, data);
    return next(request, pid, address, data);
}
