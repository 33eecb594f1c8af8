// A channel's last K values, the newest first; `//#include`d by the convolution's kernels. Up to four are a vector,
// so that they stay in registers whatever a compiler makes of loops.

override K: u32 = 4;           // taps

//#if SHORT
alias Window = vec4<f32>;

fn empty() -> Window { return vec4<f32>(0.0); }
fn push(w: Window, x: f32) -> Window { return vec4<f32>(x, w.xyz); }
fn filled(w: Window, k: u32, x: f32) -> Window {
    return select(w, vec4<f32>(x), vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(k));
}
// start + sum_k a[k] b[k]; both are 0 from K on
fn weighed(start: f32, a: Window, b: Window) -> f32 {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, start))));
}
// w + a x for the first `reach` entries
fn spread(w: Window, a: Window, x: f32, reach: u32) -> Window {
    return select(w, fma(a, vec4<f32>(x), w), vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(reach));
}
//#else
alias Window = array<f32, K>;

fn empty() -> Window { return Window(); }
fn push(w: Window, x: f32) -> Window {
    var next: Window;
    for (var k = 1u; k < K; k = k + 1u) {
        next[k] = w[k - 1u];
    }
    next[0] = x;
    return next;
}
fn filled(w: Window, k: u32, x: f32) -> Window {
    var next = w;
    next[k] = x;
    return next;
}
fn weighed(start: f32, a: Window, b: Window) -> f32 {
    var sum = start;
    for (var k = 0u; k < K; k = k + 1u) {
        sum = fma(a[k], b[k], sum);
    }
    return sum;
}
fn spread(w: Window, a: Window, x: f32, reach: u32) -> Window {
    var next = w;
    for (var k = 0u; k < min(K, reach); k = k + 1u) {
        next[k] = fma(a[k], x, w[k]);
    }
    return next;
}
//#endif
