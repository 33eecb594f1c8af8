# Softmax cross-entropy by rows; included by _pointwise.pyx.

cdef inline float max_run(mf_in x, Py_ssize_t n) noexcept nogil:
    """The largest element, NaNs passed over (they come back in the sum of exponentials)."""
    cdef float lane[LANES]
    cdef float top
    cdef Py_ssize_t i, whole = n - n % LANES
    cdef int j
    for j in range(LANES):
        lane[j] = <float> -INFINITY
    i = 0
    while i < whole:
        for j in range(LANES):
            lane[j] = x[i + j] if x[i + j] > lane[j] else lane[j]
        i += LANES
    for i in range(whole, n):
        lane[0] = x[i] if x[i] > lane[0] else lane[0]
    top = lane[0]
    for j in range(1, LANES):
        top = lane[j] if lane[j] > top else top
    return top


cdef inline void exp_run(mf_out x, float shift, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        x[i] = mf_exp(x[i] - shift)


cdef struct Loss:
    Rows logits
    const int *targets
    float *losses
    Py_ssize_t n_rows, cols
    float scale
    int ignored
    bint grad


cdef float loss_row(float *x, Py_ssize_t cols, int target, float scale, bint grad) noexcept nogil:
    # The target is taken out of the row before the others are summed. A confident row then keeps the
    # digits of its small loss, log1p(others), and of its gradient at the target, -others / total, where
    # p - 1 would cancel.
    cdef float top = max_run(x, cols), at_target = x[target]
    cdef double others = 0.0, total, loss
    cdef Py_ssize_t i = 0, n
    x[target] = <float> -INFINITY
    while i < cols:
        n = min(cols - i, <Py_ssize_t> CHUNK)
        exp_run(x + i, top, n)
        others += sum_run(x + i, n)
        i += n
    if at_target == top:
        total = 1.0 + others
        loss = log1p(others)
        if at_target - top != 0.0:      # both infinite: the difference is NaN
            total = loss = <double> (at_target - top)
    else:
        total = others + <double> mf_exp(at_target - top)
        loss = log(total) + (<double> top - <double> at_target)
    if grad:
        scale_run(x, <float> (<double> scale / total), cols)
        x[target] = <float> (-<double> scale * (others / total))
    return <float> loss


cdef void loss_task(void *ctx, Py_ssize_t task, int worker) noexcept nogil:
    cdef const Loss *job = <const Loss *> ctx
    cdef Py_ssize_t each = rows_of_task(job.cols), r
    for r in range(task * each, min(job.n_rows, (task + 1) * each)):
        if job.targets[r] == job.ignored:
            job.losses[r] = 0.0
            if job.grad:
                memset(row(&job.logits, r), 0, job.cols * sizeof(float))
        else:
            job.losses[r] = loss_row(row(&job.logits, r), job.cols, job.targets[r], job.scale, job.grad)


def cross_entropy(
    float[:, :] logits, const int[::1] targets, float[::1] losses, float scale, int ignored, bint grad,
    int threads,
):
    """Write losses (rows); with grad, logits become scale times their gradient. See `Backend.cross_entropy_`.

    The caller has checked that 0 <= target < cols where it is not `ignored`. NaN in a row makes its loss
    and its gradient NaN.
    """
    cdef Loss job
    writable(&job.logits, logits, "logits")
    job.targets, job.losses = &targets[0], &losses[0]
    job.n_rows, job.cols = logits.shape[0], logits.shape[1]
    job.scale, job.ignored, job.grad = scale, ignored, grad
    with nogil:
        parallel_for(loss_task, &job, tasks_of(job.n_rows, rows_of_task(job.cols)), threads)
