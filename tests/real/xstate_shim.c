/* Lets User-Mode Linux 6.1 run on processors whose register state is larger than it knows (AMX): preloaded into it.
 *
 * It moves the extended registers of its processes through a buffer of the size that they had until AVX-512. The host's
 * kernel cuts that short on reading, and refuses it on writing. Here a write is completed with what the process has,
 * and the components that the buffer has no room for are marked as unused: no guest uses them, its kernel knows none.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <string.h>
#define ptrace declared_with_dots
#include <sys/ptrace.h>
#undef ptrace
#include <sys/types.h>
#include <sys/uio.h>

#define XSTATE_BV 512               /* where the header says which components are in use */
#define FIRST_UNKNOWN_COMPONENT 10  /* after PKRU, the last one that the buffer has room for */

static char whole[1 << 16];         /* one thread only: User-Mode Linux is not SMP */

long ptrace(enum __ptrace_request request, pid_t pid, void *address, void *data)
{
    static long (*next)(enum __ptrace_request, pid_t, void *, void *);
    struct iovec *given = data, all = {whole, sizeof whole};
    unsigned long used;

    if (!next)
        next = (long (*)(enum __ptrace_request, pid_t, void *, void *))dlsym(RTLD_NEXT, "ptrace");
    if (request != PTRACE_SETREGSET || address != (void *)NT_X86_XSTATE)
        return next(request, pid, address, data);
    if (next(PTRACE_GETREGSET, pid, address, &all) < 0)
        return -1;
    if (given->iov_len >= all.iov_len)
        return next(request, pid, address, data);
    memcpy(whole, given->iov_base, given->iov_len);
    memcpy(&used, whole + XSTATE_BV, sizeof used);
    used &= (1UL << FIRST_UNKNOWN_COMPONENT) - 1;
    memcpy(whole + XSTATE_BV, &used, sizeof used);
    return next(request, pid, address, &all);
}
