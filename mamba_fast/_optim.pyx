# cython: language_level=3, freethreading_compatible=True
"""AdamW over flat tensors: one pass over parameters, gradients and moments.

    g' = clip * g;  m = b1 m + (1 - b1) g';  v = b2 v + (1 - b2) g'^2
    step = lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps), 0 where not finite, clamped to +-max_delta
    p = p - (lr wd p + step)

An element whose new v is not finite keeps m and v and makes no step.

Loshchilov and Hutter 2019, algorithm 2, with the trust region of SPEC 5.

Design. The pass is bound by memory, so everything an element needs is done while it is in registers.
The decay is subtracted with the step: 1 - lr * wd as a float32 factor would be off by several percent
of lr * wd. Whether to step at all is decided once for all tensors by the caller, from the global norm
(`_pointwise.sum_all`, float64: the squares of 1e25 do not overflow): a norm that is not finite means
that no element may change. Tasks are BLOCK elements; the count of clamped elements is kept for each.
"""

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, sqrtf
from libc.stdlib cimport free, malloc

from mamba_fast._kernel cimport BLOCK, mf_in, mf_out, tasks_of
from mamba_fast._threads cimport parallel_for


cdef struct Factors:
    float clip, beta1, one_minus_beta1, beta2, one_minus_beta2
    float rate              # lr / (1 - beta1^t)
    float root              # 1 / sqrt(1 - beta2^t)
    float eps, decay        # decay is lr * weight_decay
    float bound             # FLT_MAX where there is no trust region


cdef struct AdamW:
    float *p
    const float *g
    float *m
    float *v
    Py_ssize_t p_row, g_row, m_row, v_row
    Py_ssize_t n_rows, cols
    Factors f
    Py_ssize_t *clamped     # for each task


cdef inline Py_ssize_t adamw_run(
    mf_out p, mf_in g, mf_out m, mf_out v, const Factors *f, Py_ssize_t n
) noexcept nogil:
    """Update n contiguous elements and return how many steps the trust region clamped."""
    cdef Py_ssize_t i
    cdef int count = 0
    cdef float clip = f.clip, beta1 = f.beta1, rest1 = f.one_minus_beta1, beta2 = f.beta2
    cdef float rest2 = f.one_minus_beta2, rate = f.rate, root = f.root, eps = f.eps, decay = f.decay
    cdef float bound = f.bound
    cdef float grad, first, second, step, size
    cdef bint sound
    for i in range(n):
        grad = clip * g[i]
        first = beta1 * m[i] + rest1 * grad
        second = beta2 * v[i] + rest2 * (grad * grad)
        # false for NaN. One square out of range must not freeze an element for ever.
        sound = second <= <float> FLT_MAX
        m[i] = first if sound else m[i]
        v[i] = second if sound else v[i]
        second = second if sound else <float> INFINITY
        step = rate * first / (sqrtf(second) * root + eps)
        size = -step if step < 0.0 else step
        step = step if size <= <float> FLT_MAX else <float> 0.0     # false for NaN
        count += 1 if size > bound and size <= <float> FLT_MAX else 0
        step = bound if step > bound else step
        step = -bound if step < -bound else step
        p[i] = p[i] - (decay * p[i] + step)
    return count


cdef void adamw_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const AdamW *job = <const AdamW *> ctx
    cdef Py_ssize_t i = task * BLOCK, stop = min(i + BLOCK, job.n_rows * job.cols), r, c, n, count = 0
    while i < stop:
        r = i // job.cols
        c = i - r * job.cols
        n = min(job.cols - c, stop - i)
        count += adamw_run(
            job.p + r * job.p_row + c, job.g + r * job.g_row + c, job.m + r * job.m_row + c,
            job.v + r * job.v_row + c, &job.f, n,
        )
        i += n
    job.clamped[task] = count


cdef inline Py_ssize_t row_of(Py_ssize_t stride_in_bytes) noexcept nogil:
    return stride_in_bytes // <Py_ssize_t> sizeof(float)


def adamw(
    float[:, :] p, const float[:, :] g, float[:, :] m, float[:, :] v, double lr, double beta1, double beta2,
    double eps, double weight_decay, double t, double clip, double max_delta, int threads,
):
    """One step for one tensor; t counts the steps taken, this one included. max_delta = 0: no trust region.

    Updates p, m and v; all are (rows, cols) float32 with contiguous columns. Returns the number of
    elements whose step was clamped. The caller has seen to it that the gradients are finite.
    """
    cdef AdamW job
    cdef Py_ssize_t n_tasks, i, count = 0
    if p.shape[1] > 1 and not (p.strides[1] == g.strides[1] == m.strides[1] == v.strides[1] == sizeof(float)):
        raise ValueError("adamw: the last axis of every tensor must be contiguous")
    job.p, job.g, job.m, job.v = &p[0, 0], &g[0, 0], &m[0, 0], &v[0, 0]
    job.p_row, job.g_row = row_of(p.strides[0]), row_of(g.strides[0])
    job.m_row, job.v_row = row_of(m.strides[0]), row_of(v.strides[0])
    job.n_rows, job.cols = p.shape[0], p.shape[1]
    job.f.clip = <float> clip
    job.f.beta1, job.f.one_minus_beta1 = <float> beta1, <float> (1.0 - beta1)
    job.f.beta2, job.f.one_minus_beta2 = <float> beta2, <float> (1.0 - beta2)
    job.f.rate = <float> (lr / (1.0 - beta1 ** t))
    job.f.root = <float> ((1.0 - beta2 ** t) ** -0.5)
    job.f.eps, job.f.decay = <float> eps, <float> (lr * weight_decay)
    job.f.bound = <float> max_delta if max_delta > 0.0 else <float> FLT_MAX
    n_tasks = tasks_of(job.n_rows * job.cols, BLOCK)
    job.clamped = <Py_ssize_t *> malloc(n_tasks * sizeof(Py_ssize_t))
    if job.clamped == NULL:
        raise MemoryError("adamw: no memory for counters")
    with nogil:
        parallel_for(adamw_task, &job, n_tasks, threads)
        for i in range(n_tasks):
            count += job.clamped[i]
        free(job.clamped)
    return count
