# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False, freethreading_compatible=True
"""Matrix products: the BLAS library's single-threaded products, run in blocks by our own pool.

Design. Left to itself the library splits a product over a pool of its own, whose threads spin for some
26 ms after each (OpenBLAS's default) and keep ours off the cores: on two cores the scan after a product
ran no faster with two threads than with one. Here the library is held to one thread for the length of a
call and the blocks of the result are tasks of the pool that runs the kernels too. `beta` = 1 adds to
what is there, which numpy's matmul cannot.

How a product is divided depends on its shape alone, so that the bits do not depend on the number of
threads:

* The result is cut along its longer side; a small result of a long sum (the gradient of a small weight)
  is cut along the sum instead, and the parts are added in order.
* One row or column is sgemv's: sgemm would first copy the whole matrix into panels, which takes three
  times as long as the product.
* A few rows or columns go to sgemm in panels small enough for its kernels that copy nothing (OpenBLAS
  has them for AVX-512 and some others; elsewhere panels change little).

The library and its functions are found at run time, by address (backends/_blas.py).
"""

import os

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc

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
ctypedef void (*sgemv32)(int, int, int, int, float, const float *, int, const float *, int, float, float *,
                         int) noexcept nogil
ctypedef void (*sgemv64)(int, int, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t, float,
                         float *, int64_t) noexcept nogil
ctypedef void (*set_threads)(int) noexcept nogil
ctypedef int (*get_threads)() noexcept nogil

cdef enum:
    ROW_MAJOR = 101
    NO_TRANS = 111
    TRANS = 112
    MOST_BLOCKS = 16        # tasks of one product
    SMALLEST_BLOCK = 64     # rows or columns of the result in one task
    SHORTEST_SUM = 512      # terms of the sum in one task, where the sum is cut
    LARGEST_PARTIAL = 65536     # elements of a result whose sum may be cut
    WIDE_BLOCK = 256        # the same where few rows are cut across their sums
    FEW_ROWS = 16           # rows or columns for which copying the matrix costs more than it saves,
    FEW_ACROSS = 8          # and where they are cut across their sums
    PANEL = 1024            # elements of the result in a panel of few rows or columns
    SHORTEST_UNCOPIED = 32  # terms of the sum that OpenBLAS wants for not copying

cdef double SERIAL_BELOW = 2e6   # multiplications that are not worth a second thread,
cdef double ELEMENT = 7.0        # counting an element of a matrix, read or written, as this many
cdef double UNCOPIED = 1e6       # most multiplications that OpenBLAS does without copying


cdef struct Product:
    void *sgemm
    void *sgemv
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
    bint by_rows            # the result is cut into rows, else into columns
    Py_ssize_t block        # rows or columns in a task
    Py_ssize_t panel        # rows or columns in a call of sgemm
    Py_ssize_t chunk        # terms of the sum in a task, where the sum is cut
    Py_ssize_t chunks
    float *partial          # (chunks, m, n): the results of the chunks


cdef PyThread_type_lock _guard = PyThread_allocate_lock()   # guards _inside, _restore and the library's number
cdef PyThread_type_lock _gate = PyThread_allocate_lock()    # passed on the way in, held while a fork is made
cdef PyThread_type_lock _idle = PyThread_allocate_lock()    # held by the products being computed, or by a fork
cdef int _inside = 0        # products being computed
cdef int _restore = 1       # the library's own number of threads outside


cdef void enter(get_threads get, set_threads set) noexcept nogil:
    """Hold the library to one thread until the last of the concurrent products leaves."""
    global _inside, _restore
    PyThread_acquire_lock(_gate, 1)
    PyThread_acquire_lock(_guard, 1)
    if _inside == 0:
        PyThread_acquire_lock(_idle, 1)
        _restore = get()
        if _restore != 1:
            set(1)
    _inside += 1
    PyThread_release_lock(_guard)
    PyThread_release_lock(_gate)


cdef void leave(get_threads get, set_threads set) noexcept nogil:
    global _inside
    PyThread_acquire_lock(_guard, 1)
    _inside -= 1
    if _inside == 0:
        # Another number than 1 is somebody else's wish, made meanwhile (threadpoolctl): it stays.
        if _restore != 1 and get() == 1:
            set(_restore)
        PyThread_release_lock(_idle)
    PyThread_release_lock(_guard)


# A child that is forked while another thread computes a product would keep the library at one thread, and
# with bad luck a lock of the library's that nobody releases. So a fork waits for the products to end, and
# they for it.

def before_fork() -> None:
    with nogil:
        PyThread_acquire_lock(_gate, 1)
        PyThread_acquire_lock(_idle, 1)


def after_fork_in_parent() -> None:
    PyThread_release_lock(_idle)
    PyThread_release_lock(_gate)


def after_fork_in_child() -> None:
    """New locks: releasing the copy of one that threads of the parent may wait for is not defined."""
    global _guard, _gate, _idle
    _guard = PyThread_allocate_lock()
    _gate = PyThread_allocate_lock()
    _idle = PyThread_allocate_lock()


cdef void gemm(const Product *p, Py_ssize_t m, Py_ssize_t n, Py_ssize_t k, const float *a, const float *b, float beta,
               float *c, Py_ssize_t ldc) noexcept nogil:
    cdef int trans_a = TRANS if p.trans_a else NO_TRANS, trans_b = TRANS if p.trans_b else NO_TRANS
    if p.wide:
        (<sgemm64> p.sgemm)(ROW_MAJOR, trans_a, trans_b, m, n, k, p.alpha, a, p.lda, b, p.ldb, beta, c, ldc)
    else:
        (<sgemm32> p.sgemm)(ROW_MAJOR, trans_a, trans_b, <int> m, <int> n, <int> k, p.alpha, a, <int> p.lda, b,
                            <int> p.ldb, beta, c, <int> ldc)


cdef void gemv(const Product *p, bint trans, Py_ssize_t n, Py_ssize_t k, const float *matrix, Py_ssize_t ld,
               const float *x, Py_ssize_t x_step, float beta, float *y, Py_ssize_t y_step) noexcept nogil:
    """y (n) = alpha op(matrix) x (k) + beta y; with trans the matrix is stored as (k, n)."""
    cdef Py_ssize_t rows = k if trans else n, columns = n if trans else k, i
    cdef int op = TRANS if trans else NO_TRANS
    # Some versions of the library multiply by a beta of 0, which keeps NaN.
    if beta == 0.0:
        for i in range(n):
            y[i * y_step] = 0.0
    if p.wide:
        (<sgemv64> p.sgemv)(ROW_MAJOR, op, rows, columns, p.alpha, matrix, ld, x, x_step, 1.0, y, y_step)
    else:
        (<sgemv32> p.sgemv)(ROW_MAJOR, op, <int> rows, <int> columns, p.alpha, matrix, <int> ld, x, <int> x_step,
                            1.0, y, <int> y_step)


cdef void multiply(const Product *p, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t first, Py_ssize_t last, float beta,
                   float *c, Py_ssize_t ldc) noexcept nogil:
    """Rows or columns start to stop of the result, over the terms first to last of the sum; c is the
    place of the result's first element."""
    cdef const float *a = p.a + (first * p.lda if p.trans_a else first)
    cdef const float *b = p.b + (first if p.trans_b else first * p.ldb)
    cdef Py_ssize_t k = last - first, a_step, b_step, c_step, size
    # From one row (column) of the result to the next, in the matrix that is cut and in the result.
    a_step = 1 if p.trans_a else p.lda
    b_step = p.ldb if p.trans_b else 1
    c_step = ldc if p.by_rows else 1
    if p.m == 1:
        gemv(p, not p.trans_b, stop - start, k, b + start * b_step, p.ldb, a, p.lda if p.trans_a else 1, beta,
             c + start, 1)
    elif p.n == 1:
        gemv(p, p.trans_a, stop - start, k, a + start * a_step, p.lda, b, 1 if p.trans_b else p.ldb, beta,
             c + start * ldc, ldc)
    else:
        while start < stop:
            size = min(p.panel, stop - start)
            if p.by_rows:
                gemm(p, size, p.n, k, a + start * a_step, b, beta, c + start * c_step, ldc)
            else:
                gemm(p, p.m, size, k, a, b + start * b_step, beta, c + start * c_step, ldc)
            start += size


cdef void block_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    cdef Product *p = <Product *> context
    cdef Py_ssize_t start = task * p.block
    multiply(p, start, min(start + p.block, p.m if p.by_rows else p.n), 0, p.k, p.beta, p.c, p.ldc)


cdef void chunk_task(void *context, Py_ssize_t task, int worker) noexcept nogil:
    cdef Product *p = <Product *> context
    cdef Py_ssize_t first = task * p.chunk
    multiply(p, 0, p.m if p.by_rows else p.n, first, min(first + p.chunk, p.k), 0.0, p.partial + task * p.m * p.n, p.n)


cdef void add_partials(const Product *p, Py_ssize_t row) noexcept nogil:
    """One row of the result from the partial results, always in the same order."""
    cdef float *total = p.partial + row * p.n
    cdef float *c = p.c + row * p.ldc
    cdef const float *part
    cdef Py_ssize_t i, chunk
    for chunk in range(1, p.chunks):
        part = total + chunk * p.m * p.n
        for i in range(p.n):
            total[i] += part[i]
    if p.beta == 0.0:
        for i in range(p.n):
            c[i] = total[i]
    else:
        for i in range(p.n):
            c[i] = p.beta * c[i] + total[i]


cdef void divide(Product *p) noexcept nogil:
    """Choose block, panel, chunk and chunks; chunks is 1 where the sum is not cut."""
    cdef Py_ssize_t longest, shortest, least, panel
    cdef double work
    cdef bint few, dense    # the terms of the sum lie side by side in the matrix that is cut
    p.by_rows = p.m >= p.n
    longest = p.m if p.by_rows else p.n
    shortest = p.n if p.by_rows else p.m
    dense = not p.trans_a if p.by_rows else p.trans_b
    few = shortest <= (FEW_ROWS if dense else FEW_ACROSS)
    p.block = longest
    p.chunk = p.k
    p.chunks = 1
    work = <double> p.m * p.n * p.k + ELEMENT * (<double> p.m * p.k + <double> p.n * p.k + <double> p.m * p.n)
    if work >= SERIAL_BELOW:
        # Whole vectors, whole panels: multiples of 16.
        least = WIDE_BLOCK if few and not dense else SMALLEST_BLOCK
        p.block = (max((longest + MOST_BLOCKS - 1) // MOST_BLOCKS, least) + 15) // 16 * 16
        p.chunk = (max((p.k + MOST_BLOCKS - 1) // MOST_BLOCKS, SHORTEST_SUM) + 15) // 16 * 16
        p.chunks = (p.k + p.chunk - 1) // p.chunk
        if p.m * p.n > LARGEST_PARTIAL or p.chunks < (longest + p.block - 1) // p.block:
            p.chunk = p.k
            p.chunks = 1
    p.panel = longest
    if few and p.chunk >= SHORTEST_UNCOPIED:
        panel = min(<Py_ssize_t> (UNCOPIED / (<double> shortest * p.chunk)), PANEL // shortest) // 16 * 16
        if panel >= (16 if dense else 64):
            p.panel = panel


def product(size_t sgemm, size_t sgemv, bint wide, size_t get, size_t set, const float[:, :] a, bint trans_a,
            const float[:, :] b, bint trans_b, float[:, :] c, float alpha, float beta, int threads):
    """c = alpha op(a) op(b) + beta c, where op transposes if asked to.

    The matrices have contiguous rows at any distance and no extent of 0; their shapes fit and c
    overlaps neither a nor b (the caller checks). sgemm, sgemv, get and set are the addresses of
    cblas_sgemm, cblas_sgemv and of the library's functions that tell and set its number of threads;
    `wide` says that its integers have 64 bits. With beta = 0, c is only written. MemoryError where there
    is no room for partial sums (4 MB at most).
    """
    cdef Product p
    cdef Py_ssize_t blocks, row
    cdef get_threads get_them = <get_threads> <void *> <uintptr_t> get
    cdef set_threads set_them = <set_threads> <void *> <uintptr_t> set
    p.sgemm = <void *> <uintptr_t> sgemm
    p.sgemv = <void *> <uintptr_t> sgemv
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
    divide(&p)
    if p.chunks > 1:
        p.partial = <float *> malloc(p.chunks * p.m * p.n * sizeof(float))
        if p.partial == NULL:
            raise MemoryError("a matrix product found no memory for its partial sums")
    with nogil:
        enter(get_them, set_them)
        if p.chunks > 1:
            parallel_for(chunk_task, &p, p.chunks, threads)
        else:
            blocks = ((p.m if p.by_rows else p.n) + p.block - 1) // p.block
            parallel_for(block_task, &p, blocks, threads)
        leave(get_them, set_them)
        if p.chunks > 1:
            for row in range(p.m):
                add_partials(&p, row)
            free(p.partial)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=before_fork, after_in_parent=after_fork_in_parent, after_in_child=after_fork_in_child
    )
