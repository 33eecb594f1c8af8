# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=True
"""Matrix products: the BLAS library's single-threaded sgemm, run in blocks by our own pool.

Design. Left to itself the library splits a product over a pool of its own, whose threads spin for some
26 ms after each (OpenBLAS's default) and keep ours off the cores: on two cores the scan after a product
ran no faster with two threads than with one. Here the library is held to one thread for the length of a
call and the blocks of the result are tasks of the pool that runs the kernels too. The blocks depend on
the shape alone, so that the bits do not depend on the number of threads. `beta` = 1 adds to what is
there, which numpy's matmul cannot.

The library and its functions are found at run time, by address (backends/_blas.py).
"""

from libc.stdint cimport int64_t, uintptr_t

from mamba_fast._threads cimport parallel_for

cdef extern from "pythread.h" nogil:
    ctypedef void *PyThread_type_lock
    PyThread_type_lock PyThread_allocate_lock()
    int PyThread_acquire_lock(PyThread_type_lock, int wait)
    void PyThread_release_lock(PyThread_type_lock)

ctypedef void (*sgemm32)(int, int, int, int, int, int, float, const float *, int, const float *, int, float,
                         float *, int) noexcept nogil
ctypedef void (*sgemm64)(int, int, int, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *,
                         int64_t, float, float *, int64_t) noexcept nogil
ctypedef void (*set_threads)(int) noexcept nogil
ctypedef int (*get_threads)() noexcept nogil

cdef enum:
    ROW_MAJOR = 101
    NO_TRANS = 111
    TRANS = 112
    MOST_BLOCKS = 16        # tasks of one product
    SMALLEST_BLOCK = 64     # rows or columns of the result in one task

cdef double SERIAL_BELOW = 2e6   # multiplications that are not worth a second thread


cdef struct Product:
    void *sgemm
    bint wide               # 64-bit integers in the library's interface
    Py_ssize_t m, n, k
    const float *a
    Py_ssize_t lda
    bint trans_a
    const float *b
    Py_ssize_t ldb
    bint trans_b
    float *c
    Py_ssize_t ldc
    float alpha, beta
    bint by_rows
    Py_ssize_t block


cdef PyThread_type_lock _guard = PyThread_allocate_lock()
cdef int _inside = 0        # products being computed; guarded by _guard
cdef int _restore = 1       # the library's own number of threads outside


cdef void enter(get_threads get, set_threads set) noexcept nogil:
    """Hold the library to one thread until the last of the concurrent products leaves."""
    global _inside, _restore
    PyThread_acquire_lock(_guard, 1)
    if _inside == 0:
        _restore = get()
        if _restore != 1:
            set(1)
    _inside += 1
    PyThread_release_lock(_guard)


cdef void leave(set_threads set) noexcept nogil:
    global _inside
    PyThread_acquire_lock(_guard, 1)
    _inside -= 1
    if _inside == 0 and _restore != 1:
        set(_restore)
    PyThread_release_lock(_guard)


cdef void block_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    cdef Product *p = <Product *> context
    cdef Py_ssize_t start = task * p.block
    cdef Py_ssize_t m = min(p.block, p.m - start) if p.by_rows else p.m
    cdef Py_ssize_t n = p.n if p.by_rows else min(p.block, p.n - start)
    cdef const float *a = p.a
    cdef const float *b = p.b
    cdef float *c = p.c + (start * p.ldc if p.by_rows else start)
    cdef int trans_a = TRANS if p.trans_a else NO_TRANS, trans_b = TRANS if p.trans_b else NO_TRANS
    if p.by_rows:
        a += start if p.trans_a else start * p.lda
    else:
        b += start * p.ldb if p.trans_b else start
    if p.wide:
        (<sgemm64> p.sgemm)(ROW_MAJOR, trans_a, trans_b, m, n, p.k, p.alpha, a, p.lda, b, p.ldb, p.beta, c, p.ldc)
    else:
        (<sgemm32> p.sgemm)(ROW_MAJOR, trans_a, trans_b, <int> m, <int> n, <int> p.k, p.alpha, a, <int> p.lda, b,
                            <int> p.ldb, p.beta, c, <int> p.ldc)


def product(size_t sgemm, bint wide, size_t get, size_t set, const float[:, :] a, bint trans_a,
            const float[:, :] b, bint trans_b, float[:, :] c, float alpha, float beta, int threads):
    """c = alpha op(a) op(b) + beta c, where op transposes if asked to.

    The matrices have contiguous rows at any distance and no extent of 0; their shapes fit and c
    overlaps neither a nor b (the caller checks). sgemm, get and set are the addresses of cblas_sgemm and
    of the library's functions that tell and set its number of threads; `wide` says that its integers
    have 64 bits. With beta = 0, c is only written.
    """
    cdef Product p
    cdef Py_ssize_t longest, blocks
    p.sgemm = <void *> <uintptr_t> sgemm
    p.wide = wide
    p.m = c.shape[0]
    p.n = c.shape[1]
    p.k = a.shape[0] if trans_a else a.shape[1]
    p.a = &a[0, 0]
    p.b = &b[0, 0]
    p.c = &c[0, 0]
    # The distance of a single row is arbitrary, but the library wants it to be at least the width.
    p.lda = max(a.strides[0] // 4, a.shape[1])
    p.ldb = max(b.strides[0] // 4, b.shape[1])
    p.ldc = max(c.strides[0] // 4, c.shape[1])
    p.trans_a = trans_a
    p.trans_b = trans_b
    p.alpha = alpha
    p.beta = beta
    p.by_rows = p.m >= p.n
    longest = p.m if p.by_rows else p.n
    if <double> p.m * p.n * p.k < SERIAL_BELOW:
        p.block = longest
    else:
        p.block = max((longest + MOST_BLOCKS - 1) // MOST_BLOCKS, SMALLEST_BLOCK)
        p.block = (p.block + 15) // 16 * 16     # whole vectors, whole panels
    blocks = (longest + p.block - 1) // p.block
    with nogil:
        enter(<get_threads> <void *> <uintptr_t> get, <set_threads> <void *> <uintptr_t> set)
        parallel_for(block_task, &p, blocks, threads)
        leave(<set_threads> <void *> <uintptr_t> set)
