// Causal depthwise convolution with SiLU (SPEC 2.3, 2.4): one invocation computes TILE steps of one
// channel, its last K inputs in a window that slides along; four steps are loaded at a time, so that their
// way from memory overlaps. At a restart the window is emptied, which is all that there is to "no tap
// reaches before it"; the window after a row's last step is the final state.

//#include conv1d_window

override TILE: u32 = 64;       // steps of an invocation
override SILU: bool = true;
override HAS_BIAS: bool = false;
override HAS_STATE: bool = false;
override HAS_STARTS: bool = false;
override HAS_LENGTHS: bool = false;

struct Params {
    length: u32,
    width: u32,
    x: vec2<u32>,        // views: offset and row stride, in elements
    w: vec2<u32>,
    bias: vec2<u32>,
    state: vec2<u32>,
    starts: vec2<u32>,
    lengths: vec2<u32>,
    y: vec2<u32>,
    final_state: vec2<u32>,
    first_row: u32,      // batch row of the first workgroup
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> x_in: array<f32>;
@group(0) @binding(1) var<storage, read> w_in: array<f32>;
@group(0) @binding(2) var<storage, read> bias_in: array<f32>;
@group(0) @binding(3) var<storage, read> state_in: array<f32>;
@group(0) @binding(4) var<storage, read> starts_in: array<i32>;
@group(0) @binding(5) var<storage, read> lengths_in: array<i32>;
@group(0) @binding(6) var<storage, read_write> y_out: array<f32>;
@group(0) @binding(7) var<storage, read_write> final_out: array<f32>;

const PAST: u32 = K - 1u;

// What came `back` steps before t = 0, 1 <= back <= PAST.
fn state_at(batch: u32, e: u32, back: u32) -> f32 {
    if HAS_STATE {
        return state_in[params.state.x + (batch * PAST + (PAST - back)) * params.state.y + e];
    }
    return 0.0;
}

fn is_start(batch: u32, t: u32) -> bool {
    if HAS_STARTS {
        return starts_in[params.starts.x + batch * params.starts.y + t] != 0;
    }
    return false;
}

// The window one step on.
fn slide(w: Window, x: f32, restart: bool) -> Window {
    if HAS_STARTS && restart {
        return push(empty(), x);
    }
    return push(w, x);
}

struct Row {
    batch: u32,
    e: u32,
    length: u32,
    taps: Window,
    bias: f32,
}

// Stores the output of step t and, after a row's last one, the final state.
fn emit(row: Row, w: Window, t: u32) {
    var sum = weighed(row.bias, row.taps, w);
    if SILU {
        sum = silu(sum);
    }
    if t < params.length {
        let live = t < row.length;
        y_out[params.y.x + (row.batch * params.length + t) * params.y.y + row.e] = select(0.0, sum, live);
    }
    if t + 1u == row.length {
        for (var k = 0u; k < PAST; k = k + 1u) {
            let at = row.batch * PAST + (PAST - (k + 1u));
            final_out[params.final_state.x + at * params.final_state.y + row.e] = w[k];
        }
    }
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = group.x * 64u + lane;
    let batch = params.first_row + group.z;
    if e >= params.width {
        return;
    }
    var row = Row(batch, e, params.length, empty(), 0.0);
    if HAS_LENGTHS {
        row.length = min(row.length, u32(lengths_in[params.lengths.x + batch]));
    }
    if HAS_BIAS {
        row.bias = bias_in[params.bias.x + e];
    }
    for (var k = 0u; k < K; k = k + 1u) {
        row.taps = filled(row.taps, k, w_in[params.w.x + e * params.w.y + k]);
    }
    let first = group.y * TILE;
    let end = min(first + TILE, params.length);
    let base = params.x.x + batch * params.length * params.x.y + e;
    let last = params.length - 1u;
    var w = empty();
    for (var back = PAST; back > 0u; back = back - 1u) {
        if first >= back {
            w = slide(w, x_in[base + (first - back) * params.x.y], is_start(batch, first - back));
        } else {
            w = push(w, state_at(batch, e, back - first));
        }
    }
    //#if SHORT
    for (var t = first; t < end; t = t + 4u) {
        let at = base + min(vec4<u32>(t, t + 1u, t + 2u, t + 3u), vec4<u32>(last)) * params.x.y;
        let x = vec4<f32>(x_in[at.x], x_in[at.y], x_in[at.z], x_in[at.w]);
        w = slide(w, x.x, is_start(batch, t));
        emit(row, w, t);
        w = slide(w, x.y, is_start(batch, min(t + 1u, last)));
        emit(row, w, t + 1u);
        w = slide(w, x.z, is_start(batch, min(t + 2u, last)));
        emit(row, w, t + 2u);
        w = slide(w, x.w, is_start(batch, min(t + 3u, last)));
        emit(row, w, t + 3u);
    }
    //#else
    for (var t = first; t < end; t = t + 1u) {
        w = slide(w, x_in[base + t * params.x.y], is_start(batch, t));
        emit(row, w, t);
    }
    //#endif
}
