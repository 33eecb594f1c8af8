# cython: language_level=3, freethreading_compatible=True
"""Everything that is done to rows: sums, biases, the decay, embedding, RMSNorm and cross-entropy.

Design. Every tensor comes as (rows, cols) with contiguous columns and rows a fixed distance apart, which
covers whole tensors, their column views and their parts along the first axis. Elementwise loops cut
the rows * cols elements into tasks of BLOCK; loops over rows take as many rows as make up BLOCK
elements. Sums over rows (the gradients of biases and norm weights) are cut into at most GROUPS groups
of rows; a group sums FLUSH rows in float32, then adds to its float64 partial sum; the partial sums are
added in order. Sums along a row are float64 throughout. All boundaries follow from shapes, so results
have the same bits at any thread count.
"""

from libc.math cimport INFINITY, log, log1p, sqrt
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

from mamba_fast._kernel cimport (
    BLOCK, LANES, add_run, dot_run, flush_run, fold, mf_exp, mf_in, mf_out, sum_run, tasks_of,
)
from mamba_fast._threads cimport parallel_for

cdef enum:
    GROUPS = 64         # most groups of rows of a column sum: bounds the memory of the partial sums
    GROUP_ROWS = 16     # fewest rows of such a group
    FLUSH = 32          # rows summed in float32 before they are added to the float64 sums
    CHUNK = 1024        # elements exponentiated, then summed while they are in the nearest cache
    SCATTER_TILE = 64   # channels of a task of embedding_backward


cdef struct Rows:
    float *data
    Py_ssize_t stride


cdef int writable(Rows *rows, float[:, :] a, str name) except -1:
    if a.shape[1] > 1 and a.strides[1] != sizeof(float):
        raise ValueError(f"{name}: the last axis must be contiguous, its stride is {a.strides[1]} bytes")
    rows.data = &a[0, 0]
    rows.stride = a.strides[0] // <Py_ssize_t> sizeof(float)
    return 0


cdef int readable(Rows *rows, const float[:, :] a, str name) except -1:
    """Like `writable`; the kernels only read through the result."""
    if a.shape[1] > 1 and a.strides[1] != sizeof(float):
        raise ValueError(f"{name}: the last axis must be contiguous, its stride is {a.strides[1]} bytes")
    rows.data = <float *> &a[0, 0]
    rows.stride = a.strides[0] // <Py_ssize_t> sizeof(float)
    return 0


cdef inline float *row(const Rows *rows, Py_ssize_t r) noexcept nogil:
    return rows.data + r * rows.stride


cdef inline Py_ssize_t rows_of_task(Py_ssize_t cols) noexcept nogil:
    return max(<Py_ssize_t> 1, BLOCK // cols)


cdef inline Py_ssize_t groups_of(Py_ssize_t n_rows) noexcept nogil:
    return min(<Py_ssize_t> GROUPS, tasks_of(n_rows, GROUP_ROWS))


# ---- elementwise -------------------------------------------------------------------------------

cdef inline void plus_run(mf_out out, mf_in a, mf_in b, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        out[i] = a[i] + b[i]


cdef inline void scale_run(mf_out out, float alpha, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        out[i] *= alpha


cdef struct Elementwise:
    Rows out, a, b
    Py_ssize_t n_rows, cols
    float factor


cdef void add_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Elementwise *job = <const Elementwise *> ctx
    cdef Py_ssize_t i = task * BLOCK, stop = min(i + BLOCK, job.n_rows * job.cols), r, c, n
    while i < stop:
        r = i // job.cols
        c = i - r * job.cols
        n = min(job.cols - c, stop - i)
        plus_run(row(&job.out, r) + c, row(&job.a, r) + c, row(&job.b, r) + c, n)
        i += n


cdef void accumulate_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Elementwise *job = <const Elementwise *> ctx
    cdef Py_ssize_t i = task * BLOCK, stop = min(i + BLOCK, job.n_rows * job.cols), r, c, n
    while i < stop:
        r = i // job.cols
        c = i - r * job.cols
        n = min(job.cols - c, stop - i)
        add_run(row(&job.out, r) + c, row(&job.a, r) + c, n)
        i += n


cdef void scale_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Elementwise *job = <const Elementwise *> ctx
    cdef Py_ssize_t i = task * BLOCK, stop = min(i + BLOCK, job.n_rows * job.cols), r, c, n
    while i < stop:
        r = i // job.cols
        c = i - r * job.cols
        n = min(job.cols - c, stop - i)
        scale_run(row(&job.out, r) + c, job.factor, n)
        i += n


cdef void bias_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Elementwise *job = <const Elementwise *> ctx
    cdef Py_ssize_t each = rows_of_task(job.cols), r
    for r in range(task * each, min(job.n_rows, (task + 1) * each)):
        add_run(row(&job.out, r), job.b.data, job.cols)


def add(float[:, :] out, const float[:, :] a, const float[:, :] b, int threads):
    """out = a + b."""
    cdef Elementwise job
    writable(&job.out, out, "out")
    readable(&job.a, a, "a")
    readable(&job.b, b, "b")
    job.n_rows, job.cols = out.shape[0], out.shape[1]
    with nogil:
        parallel_for(add_task, &job, tasks_of(job.n_rows * job.cols, BLOCK), threads)


def accumulate(float[:, :] out, const float[:, :] a, int threads):
    """out += a."""
    cdef Elementwise job
    writable(&job.out, out, "out")
    readable(&job.a, a, "a")
    job.n_rows, job.cols = out.shape[0], out.shape[1]
    with nogil:
        parallel_for(accumulate_task, &job, tasks_of(job.n_rows * job.cols, BLOCK), threads)


def scale(float[:, :] out, float factor, int threads):
    """out *= factor."""
    cdef Elementwise job
    writable(&job.out, out, "out")
    job.n_rows, job.cols, job.factor = out.shape[0], out.shape[1], factor
    with nogil:
        parallel_for(scale_task, &job, tasks_of(job.n_rows * job.cols, BLOCK), threads)


def add_bias(float[:, :] out, const float[::1] bias, int threads):
    """Every row of out += bias (cols)."""
    cdef Elementwise job
    writable(&job.out, out, "out")
    job.b.data = <float *> &bias[0]
    job.n_rows, job.cols = out.shape[0], out.shape[1]
    with nogil:
        parallel_for(bias_task, &job, tasks_of(job.n_rows, rows_of_task(job.cols)), threads)


# ---- sums --------------------------------------------------------------------------------------

cdef struct Sum:
    Rows x
    Py_ssize_t n_rows, cols
    bint squares
    double *partial         # one for each task


cdef void sum_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Sum *job = <const Sum *> ctx
    cdef Py_ssize_t i = task * BLOCK, stop = min(i + BLOCK, job.n_rows * job.cols), r, c, n
    cdef double total = 0.0
    cdef const float *x
    while i < stop:
        r = i // job.cols
        c = i - r * job.cols
        n = min(job.cols - c, stop - i)
        x = row(&job.x, r) + c
        total += dot_run(x, x, n) if job.squares else sum_run(x, n)
        i += n
    job.partial[task] = total


def sum_all(const float[:, :] x, bint squares, int threads):
    """The sum of all elements, or of their squares, in float64: a Python float."""
    cdef Sum job
    cdef Py_ssize_t n_tasks, i
    cdef double total = 0.0
    readable(&job.x, x, "x")
    job.n_rows, job.cols, job.squares = x.shape[0], x.shape[1], squares
    n_tasks = tasks_of(job.n_rows * job.cols, BLOCK)
    job.partial = <double *> malloc(n_tasks * sizeof(double))
    if job.partial == NULL:
        raise MemoryError("sum: no memory for partial sums")
    with nogil:
        parallel_for(sum_task, &job, n_tasks, threads)
        for i in range(n_tasks):
            total += job.partial[i]
        free(job.partial)
    return total


def store(double value, float[::1] out):
    """out[0] = value, rounded to float32; infinite where it is too large."""
    out[0] = <float> value


# Sums over rows, one for each column: float32 over FLUSH rows, float64 over the rest.

cdef struct Columns:
    Py_ssize_t groups, cols
    double *partial         # (groups, cols)
    float *acc              # (workers, cols)


cdef int columns_begin(Columns *sums, Py_ssize_t n_rows, Py_ssize_t cols, int threads) except -1:
    """Allocate zeroed sums. `columns_free` must follow, also after an error."""
    cdef Py_ssize_t workers
    sums.groups, sums.cols = groups_of(n_rows), cols
    workers = max(<Py_ssize_t> 1, min(<Py_ssize_t> threads, sums.groups))
    sums.partial = <double *> malloc(sums.groups * cols * sizeof(double))
    sums.acc = <float *> malloc(workers * cols * sizeof(float))
    if sums.partial == NULL or sums.acc == NULL:
        raise MemoryError("no memory for partial sums")
    memset(sums.partial, 0, sums.groups * cols * sizeof(double))
    memset(sums.acc, 0, workers * cols * sizeof(float))
    return 0


cdef void columns_add_to(const Columns *sums, float *out) noexcept nogil:
    cdef Py_ssize_t g, i
    for g in range(1, sums.groups):
        for i in range(sums.cols):
            sums.partial[i] += sums.partial[g * sums.cols + i]
    for i in range(sums.cols):
        out[i] += <float> sums.partial[i]


cdef void columns_free(Columns *sums) noexcept nogil:
    free(sums.partial)
    free(sums.acc)


cdef struct ColumnSum:
    Columns sums
    Rows x
    Py_ssize_t n_rows


cdef void column_sum_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const ColumnSum *job = <const ColumnSum *> ctx
    cdef const Columns *sums = &job.sums
    cdef Py_ssize_t first = task * job.n_rows // sums.groups, stop = (task + 1) * job.n_rows // sums.groups, r
    cdef float *acc = sums.acc + worker * sums.cols
    for r in range(first, stop):
        add_run(acc, row(&job.x, r), sums.cols)
        if (r - first) % FLUSH == FLUSH - 1 or r == stop - 1:
            flush_run(sums.partial + task * sums.cols, acc, sums.cols)


def column_sums(const float[:, :] x, float[::1] out, int threads):
    """out += x summed over its rows."""
    cdef ColumnSum job
    memset(&job, 0, sizeof(ColumnSum))
    readable(&job.x, x, "x")
    job.n_rows = x.shape[0]
    try:
        columns_begin(&job.sums, x.shape[0], x.shape[1], threads)
        with nogil:
            parallel_for(column_sum_task, &job, job.sums.groups, threads)
            columns_add_to(&job.sums, &out[0])
    finally:
        columns_free(&job.sums)


# ---- decay -------------------------------------------------------------------------------------

cdef inline void decay_run(mf_out a, mf_in a_log, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    cdef float x
    for i in range(n):
        x = a_log[i]
        x = <float> -10.0 if x < <float> -10.0 else x       # comparisons that NaN passes through
        x = <float> 5.0 if x > <float> 5.0 else x
        a[i] = -mf_exp(x)


cdef inline void decay_backward_run(
    mf_out d_a_log, mf_in d_a, mf_in a, mf_in a_log, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i
    cdef float product
    for i in range(n):
        product = d_a[i] * a[i]
        d_a_log[i] += <float> 0.0 if a_log[i] <= <float> -10.0 or a_log[i] >= <float> 5.0 else product


def decay(const float[:, :] a_log, float[:, :] a):
    """a = -exp(clamp(a_log, -10, 5))."""
    cdef Rows x, y
    cdef Py_ssize_t r
    readable(&x, a_log, "a_log")
    writable(&y, a, "a")
    with nogil:
        for r in range(a_log.shape[0]):
            decay_run(row(&y, r), row(&x, r), a_log.shape[1])


def decay_backward(const float[:, :] d_a, const float[:, :] a, const float[:, :] a_log, float[:, :] d_a_log):
    """d_a_log += d_a * a where -10 < a_log < 5."""
    cdef Rows g, y, x, out
    cdef Py_ssize_t r
    readable(&g, d_a, "d_a")
    readable(&y, a, "a")
    readable(&x, a_log, "a_log")
    writable(&out, d_a_log, "d_a_log")
    with nogil:
        for r in range(a_log.shape[0]):
            decay_backward_run(row(&out, r), row(&g, r), row(&y, r), row(&x, r), a_log.shape[1])


# ---- RMSNorm -----------------------------------------------------------------------------------

cdef struct Norm:
    Rows x, y, dx
    const float *w          # or NULL: ones
    double *inv             # (rows): 1 / sqrt(mean square + eps)
    Py_ssize_t n_rows, cols
    double eps
    bint add_to_dx, want_dw
    Columns sums


cdef inline void norm_run(mf_out y, mf_in x, mf_in w, float inv, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        y[i] = x[i] * inv * w[i]


cdef inline void norm_unit_run(mf_out y, mf_in x, float inv, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        y[i] = x[i] * inv


cdef inline double dot3_run(mf_in a, mf_in b, mf_in c, Py_ssize_t n) noexcept nogil:
    """sum_i a[i] b[i] c[i] in float64."""
    cdef double lane[LANES]
    cdef Py_ssize_t i, whole = n - n % LANES
    cdef int j
    for j in range(LANES):
        lane[j] = 0.0
    i = 0
    while i < whole:
        for j in range(LANES):
            lane[j] += <double> a[i + j] * <double> b[i + j] * <double> c[i + j]
        i += LANES
    for i in range(whole, n):
        lane[i - whole] += <double> a[i] * <double> b[i] * <double> c[i]
    return fold(lane)


# The two terms of dx cancel where dy is nearly parallel to x (in a row of one element, always), so they
# are subtracted in float64.

cdef inline void norm_dx_run(
    mf_out dx, mf_in dy, mf_in w, mf_in x, double inv, double pull, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        dx[i] += <float> (<double> dy[i] * <double> w[i] * inv - <double> x[i] * pull)


cdef inline void norm_unit_dx_run(
    mf_out dx, mf_in dy, mf_in x, double inv, double pull, Py_ssize_t n
) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        dx[i] += <float> (<double> dy[i] * inv - <double> x[i] * pull)


cdef inline void norm_dw_run(mf_out dw, mf_in dy, mf_in x, float inv, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        dw[i] += dy[i] * (x[i] * inv)


cdef void norm_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Norm *job = <const Norm *> ctx
    cdef Py_ssize_t each = rows_of_task(job.cols), r
    cdef const float *x
    for r in range(task * each, min(job.n_rows, (task + 1) * each)):
        x = row(&job.x, r)
        job.inv[r] = 1.0 / sqrt(dot_run(x, x, job.cols) / <double> job.cols + job.eps)
        if job.w != NULL:
            norm_run(row(&job.y, r), x, job.w, <float> job.inv[r], job.cols)
        else:
            norm_unit_run(row(&job.y, r), x, <float> job.inv[r], job.cols)


cdef void norm_backward_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    # dx = inv (w dy) - x inv^3 / D sum(x w dy)
    cdef const Norm *job = <const Norm *> ctx
    cdef const Columns *sums = &job.sums
    cdef Py_ssize_t first = task * job.n_rows // sums.groups, stop = (task + 1) * job.n_rows // sums.groups, r
    cdef Py_ssize_t n = job.cols
    cdef float *acc = sums.acc + worker * n
    cdef const float *x
    cdef const float *dy
    cdef float *dx
    cdef double inv, total
    for r in range(first, stop):
        x, dy, dx, inv = row(&job.x, r), row(&job.y, r), row(&job.dx, r), job.inv[r]
        if not job.add_to_dx:
            memset(dx, 0, n * sizeof(float))
        if job.w != NULL:
            total = dot3_run(dy, job.w, x, n)
            norm_dx_run(dx, dy, job.w, x, inv, total * inv * inv * inv / <double> n, n)
        else:
            total = dot_run(dy, x, n)
            norm_unit_dx_run(dx, dy, x, inv, total * inv * inv * inv / <double> n, n)
        if job.want_dw:
            norm_dw_run(acc, dy, x, <float> inv, n)
            if (r - first) % FLUSH == FLUSH - 1 or r == stop - 1:
                flush_run(sums.partial + task * n, acc, n)


def rms_norm(
    const float[:, :] x, const float[::1] w, double eps, float[:, :] y, double[::1] inv, int threads,
):
    """y = x * w * inv and inv = 1 / sqrt(mean(x^2) + eps) for each row; w (cols) or None."""
    cdef Norm job
    memset(&job, 0, sizeof(Norm))
    readable(&job.x, x, "x")
    writable(&job.y, y, "y")
    job.inv, job.eps, job.n_rows, job.cols = &inv[0], eps, x.shape[0], x.shape[1]
    if w is not None:
        job.w = &w[0]
    with nogil:
        parallel_for(norm_task, &job, tasks_of(job.n_rows, rows_of_task(job.cols)), threads)


def rms_norm_backward(
    const float[:, :] dy, const float[:, :] x, const float[::1] w, const double[::1] inv, float[:, :] dx,
    bint add_to_dx, float[::1] dw, int threads,
):
    """Write dx, or add to it, and add to dw (cols) unless it is None."""
    cdef Norm job
    memset(&job, 0, sizeof(Norm))
    readable(&job.y, dy, "dy")
    readable(&job.x, x, "x")
    writable(&job.dx, dx, "dx")
    job.inv, job.n_rows, job.cols = <double *> &inv[0], x.shape[0], x.shape[1]
    job.add_to_dx, job.want_dw = add_to_dx, dw is not None
    if w is not None:
        job.w = &w[0]
    try:
        columns_begin(&job.sums, job.n_rows, job.cols, threads)
        with nogil:
            parallel_for(norm_backward_task, &job, job.sums.groups, threads)
        if dw is not None:
            columns_add_to(&job.sums, &dw[0])
    finally:
        columns_free(&job.sums)


# ---- embedding, cross-entropy ------------------------------------------------------------------

include "_pointwise_embedding.pxi"
include "_pointwise_loss.pxi"
