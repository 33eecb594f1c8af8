// Gradients of the convolution (SPEC 3). As in conv1d_forward.wgsl one invocation walks TILE steps of one
// channel with a window of its last K inputs, from which it computes the sum before SiLU again. Each step
// adds its share to the gradients of the inputs in the window: `pending` slides along with it, and what
// drops out at the end is complete. The first tile begins K - 1 steps early: those gradients are the
// initial state's.
//
// The operands but x and dy are in `packed` (conv_pack): K taps a channel, bias a channel, initial states,
// the final states' gradients, and one number a step: 0, 1 for a restart, 2 at and beyond the length.
// `scratch` takes the gradients of the initial states, then each tile's share of (dw, dbias), which
// `reduce` adds up in order.

//#include conv1d_window

override TILE: u32 = 64;       // steps of an invocation
override SILU: bool = true;
override MASKED: bool = false;
override HAS_BIAS: bool = false;
override HAS_STATE: bool = false;
override HAS_D_FINAL: bool = false;
override HAS_STARTS: bool = false;
override HAS_LENGTHS: bool = false;
override HAS_DW: bool = false;
override HAS_DBIAS: bool = false;

struct Params {
    length: u32,
    width: u32,
    batch: u32,
    tiles: u32,
    bias_at: u32,        // offsets in packed; taps are at 0
    state_at: u32,
    d_final_at: u32,
    flags_at: u32,
    shares_at: u32,      // offset in scratch; the initial states' gradients are at 0
    first_row: u32,      // batch row of the first workgroup
    x: vec2<u32>,        // views: offset and row stride, in elements
    dy: vec2<u32>,
    dx: vec2<u32>,
    w: vec2<u32>,
    bias: vec2<u32>,
    state: vec2<u32>,
    d_final: vec2<u32>,
    starts: vec2<u32>,
    lengths: vec2<u32>,
    dw: vec2<u32>,
    dbias: vec2<u32>,
    d_state: vec2<u32>,
}

@group(1) @binding(0) var<uniform> params: Params;
@group(0) @binding(0) var<storage, read> x_in: array<f32>;
@group(0) @binding(1) var<storage, read> dy_in: array<f32>;
@group(0) @binding(2) var<storage, read> packed_in: array<f32>;
@group(0) @binding(3) var<storage, read_write> dx_out: array<f32>;
@group(0) @binding(4) var<storage, read_write> scratch: array<f32>;

@group(0) @binding(5) var<storage, read> w_in: array<f32>;
@group(0) @binding(6) var<storage, read> bias_in: array<f32>;
@group(0) @binding(7) var<storage, read> state_in: array<f32>;
@group(0) @binding(8) var<storage, read> d_final_in: array<f32>;
@group(0) @binding(9) var<storage, read> starts_in: array<i32>;
@group(0) @binding(10) var<storage, read> lengths_in: array<i32>;
@group(0) @binding(11) var<storage, read_write> packed_out: array<f32>;

@group(0) @binding(12) var<storage, read> shares_in: array<f32>;
@group(0) @binding(13) var<storage, read_write> dw_out: array<f32>;
@group(0) @binding(14) var<storage, read_write> dbias_out: array<f32>;
@group(0) @binding(15) var<storage, read_write> d_state_out: array<f32>;

const PAST: u32 = K - 1u;

// One invocation for one number of packed.
@compute @workgroup_size(64)
fn pack(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    if i < params.bias_at {
        packed_out[i] = w_in[params.w.x + (i % params.width) * params.w.y + i / params.width];
    } else if i < params.state_at {
        let e = i - params.bias_at;
        packed_out[i] = 0.0;
        if HAS_BIAS {
            packed_out[i] = bias_in[params.bias.x + e];
        }
    } else if i < params.d_final_at {
        let at = i - params.state_at;
        packed_out[i] = 0.0;
        if HAS_STATE {
            packed_out[i] = state_in[params.state.x + (at / params.width) * params.state.y + at % params.width];
        }
    } else if i < params.flags_at {
        let at = i - params.d_final_at;
        packed_out[i] = 0.0;
        if HAS_D_FINAL {
            packed_out[i] =
                d_final_in[params.d_final.x + (at / params.width) * params.d_final.y + at % params.width];
        }
    } else if i < params.flags_at + params.batch * params.length {
        let batch = (i - params.flags_at) / params.length;
        let t = (i - params.flags_at) % params.length;
        var flag = 0.0;
        if HAS_STARTS {
            flag = select(0.0, 1.0, starts_in[params.starts.x + batch * params.starts.y + t] != 0);
        }
        if HAS_LENGTHS {
            flag = select(flag, 2.0, t >= u32(lengths_in[params.lengths.x + batch]));
        }
        packed_out[i] = flag;
    }
}

struct Row {
    batch: u32,
    e: u32,
    length: u32,
    first: u32,          // steps of the tile
    end: u32,
    taps: Window,
    bias: f32,
}

struct Slide {
    window: Window,      // inputs
    pending: Window,     // their gradients so far
    dw: Window,
    dbias: f32,
    last_start: u32,     // the count of the last restart, plus 1; 0: none
}

// One step on. `i` counts steps from PAST before t = 0, so that t = i - PAST; x and dy are those of that step,
// flag is 2 where there is none.
fn slide(row: Row, before: Slide, i: u32, x: f32, dy: f32, flag: f32) -> Slide {
    var s = before;
    if MASKED && flag == 1.0 {
        s.window = empty();
        s.last_start = i + 1u;
    }
    s.window = push(s.window, x);
    s.pending = push(s.pending, 0.0);
    if i < row.first + PAST {
        return s;
    }
    if flag < 2.0 {
        var g = dy;
        if SILU {
            g = g * silu_prime(weighed(row.bias, row.taps, s.window));
        }
        // Taps that reach before the last restart have no part in the sum.
        s.pending = spread(s.pending, row.taps, g, i + 1u - select(0u, s.last_start - 1u, s.last_start > 0u));
        if i - PAST < row.end {
            s.dw = spread(s.dw, s.window, g, K);
            s.dbias = s.dbias + g;
        }
    }
    // The input PAST steps back has all its shares.
    var out = s.pending[PAST];
    let source = i - PAST;              // its count
    if HAS_D_FINAL {
        // It is entry `source - length` of the final state, unless a restart came after it.
        if source >= row.length && source < row.length + PAST && source + 1u >= s.last_start {
            let entry = row.batch * PAST + (source - row.length);
            out = out + packed_in[params.d_final_at + entry * params.width + row.e];
        }
    }
    if source < PAST {
        if row.first == 0u {
            scratch[(row.batch * PAST + source) * params.width + row.e] = out;
        }
    } else if source - PAST >= row.first && source - PAST < row.end {
        let t = source - PAST;
        let at = params.dx.x + (row.batch * params.length + t) * params.dx.y + row.e;
        dx_out[at] = select(0.0, out, t < row.length);
    }
    return s;
}

fn flag_at(row: Row, t: u32) -> f32 {
    if t >= row.length {
        return 2.0;
    }
    if MASKED {
        return packed_in[params.flags_at + row.batch * params.length + t];
    }
    return 0.0;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = group.x * 64u + lane;
    let batch = params.first_row + group.z;
    if e >= params.width {
        return;
    }
    let first = group.y * TILE;
    let bias = packed_in[params.bias_at + e];
    var row = Row(batch, e, params.length, first, min(first + TILE, params.length), empty(), bias);
    for (var k = 0u; k < K; k = k + 1u) {
        row.taps = filled(row.taps, k, packed_in[k * params.width + e]);
    }
    if MASKED && packed_in[params.flags_at + (batch + 1u) * params.length - 1u] == 2.0 {
        // The first step beyond the row's length, by halving.
        var low = 1u;
        while low < row.length {
            let middle = (low + row.length) / 2u;
            if packed_in[params.flags_at + batch * params.length + middle] == 2.0 {
                row.length = middle;
            } else {
                low = middle + 1u;
            }
        }
    }

    var s = Slide(empty(), empty(), empty(), 0.0, 0u);
    // The window fills during PAST steps before the tile.
    for (var i = first; i < first + PAST; i = i + 1u) {
        if i < PAST {
            s = slide(row, s, i, packed_in[params.state_at + (batch * PAST + i) * params.width + e], 0.0, 0.0);
        } else {
            let x = x_in[params.x.x + (batch * params.length + i - PAST) * params.x.y + e];
            let flag = flag_at(row, i - PAST);
            s = slide(row, s, i, select(0.0, x, flag < 2.0), 0.0, flag);
        }
    }
    // The last input of the tile has its gradient PAST steps after it.
    let last = params.length - 1u;
    //#if SHORT
    for (var t = first; t < row.end + PAST; t = t + 4u) {
        let ts = vec4<u32>(t, t + 1u, t + 2u, t + 3u);
        let rows = batch * params.length + min(ts, vec4<u32>(last));
        let at = params.x.x + e + rows * params.x.y;
        let at_y = params.dy.x + e + rows * params.dy.y;
        let x = vec4<f32>(x_in[at.x], x_in[at.y], x_in[at.z], x_in[at.w]);
        let dy = vec4<f32>(dy_in[at_y.x], dy_in[at_y.y], dy_in[at_y.z], dy_in[at_y.w]);
        let f = vec4<f32>(flag_at(row, ts.x), flag_at(row, ts.y), flag_at(row, ts.z), flag_at(row, ts.w));
        let live = select(vec4<f32>(0.0), x, f < vec4<f32>(2.0));
        s = slide(row, s, t + PAST, live.x, dy.x, f.x);
        s = slide(row, s, t + PAST + 1u, live.y, dy.y, f.y);
        s = slide(row, s, t + PAST + 2u, live.z, dy.z, f.z);
        s = slide(row, s, t + PAST + 3u, live.w, dy.w, f.w);
    }
    //#else
    for (var t = first; t < row.end + PAST; t = t + 1u) {
        let at = batch * params.length + min(t, last);
        let x = x_in[params.x.x + at * params.x.y + e];
        let dy = dy_in[params.dy.x + at * params.dy.y + e];
        let f = flag_at(row, t);
        s = slide(row, s, t + PAST, select(0.0, x, f < 2.0), dy, f);
    }
    //#endif
    let share = (batch * params.tiles + group.y) * (K + 1u);
    for (var k = 0u; k < K; k = k + 1u) {
        scratch[params.shares_at + (share + k) * params.width + e] = s.dw[k];
    }
    scratch[params.shares_at + (share + K) * params.width + e] = s.dbias;
}

var<workgroup> partial: array<f32, 64>;

// One workgroup for one tap (or the bias) of 16 channels: four invocations a channel add up every fourth
// share, then their sums.
@compute @workgroup_size(64)
fn reduce(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = group.x * 16u + lane % 16u;
    let k = group.y;
    var total = 0.0;
    if e < params.width {
        for (var share = lane / 16u; share < params.batch * params.tiles; share = share + 4u) {
            total = total + shares_in[params.shares_at + (share * (K + 1u) + k) * params.width + e];
        }
    }
    partial[lane] = total;
    workgroupBarrier();
    if lane >= 16u || e >= params.width {
        return;
    }
    total = (partial[lane] + partial[lane + 16u]) + (partial[lane + 32u] + partial[lane + 48u]);
    if k < K {
        if HAS_DW {
            let at = params.dw.x + e * params.dw.y + k;
            dw_out[at] = dw_out[at] + total;
        }
    } else if HAS_DBIAS {
        dbias_out[params.dbias.x + e] = dbias_out[params.dbias.x + e] + total;
    }
}

// One invocation for one number of the initial states' gradients.
@compute @workgroup_size(64)
fn unpack(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
          @builtin(local_invocation_index) lane: u32) {
    let i = group_index(group, groups) * 64u + lane;
    if i >= params.batch * PAST * params.width {
        return;
    }
    d_state_out[params.d_state.x + (i / params.width) * params.d_state.y + i % params.width] = shares_in[i];
}
