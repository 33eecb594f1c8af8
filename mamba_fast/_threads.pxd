# The thread pool that every kernel shares; see _threads.pyx.

# A kernel's unit of work. `task` counts from 0; `worker` is the index of the thread that runs
# it, 0 <= worker < threads, so that a kernel can keep one scratch block for each thread.
ctypedef void (*task_fn)(void *ctx, Py_ssize_t task, int worker) noexcept nogil

# Run fn(ctx, task, worker) for 0 <= task < n_tasks on up to `threads` threads and return when
# all are done. Must be called without an exception pending; neither takes nor needs the GIL.
cdef void parallel_for(task_fn fn, void *ctx, Py_ssize_t n_tasks, int threads) noexcept nogil
