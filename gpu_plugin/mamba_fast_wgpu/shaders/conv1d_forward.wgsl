// Causal depthwise convolution with SiLU (SPEC 2.3, 2.4): one invocation computes TILE steps of one
// channel, its last K inputs in a window that slides along. At a restart the window is emptied, which is
// all that there is to "no tap reaches before it"; the window after a row's last step is the final state.

override K: u32 = 4;           // taps
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

// The input t - PAST steps from the start, PAST = K - 1: the first PAST of them are the initial state.
fn input_at(batch: u32, e: u32, t: u32) -> f32 {
    if t >= K - 1u {
        return x_in[params.x.x + (batch * params.length + t - (K - 1u)) * params.x.y + e];
    }
    if HAS_STATE {
        return state_in[params.state.x + (batch * (K - 1u) + t) * params.state.y + e];
    }
    return 0.0;
}

fn starts_at(batch: u32, t: u32) -> bool {
    if HAS_STARTS {
        return starts_in[params.starts.x + batch * params.starts.y + t] != 0;
    }
    return false;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let e = group.x * 64u + lane;
    let batch = params.first_row + group.z;
    if e >= params.width {
        return;
    }
    var length = params.length;
    if HAS_LENGTHS {
        length = min(length, u32(lengths_in[params.lengths.x + batch]));
    }
    var bias = 0.0;
    if HAS_BIAS {
        bias = bias_in[params.bias.x + e];
    }
    var taps: array<f32, K>;
    var window: array<f32, K>;      // the newest input first
    for (var k = 0u; k < K; k = k + 1u) {
        taps[k] = w_in[params.w.x + e * params.w.y + k];
        window[k] = 0.0;
    }
    let first = group.y * TILE;
    let end = min(first + TILE, params.length);
    // Counted from K - 1 steps before the tile, which only fill the window.
    for (var i = first; i < end + (K - 1u); i = i + 1u) {
        if i >= K - 1u && i - (K - 1u) >= length {
            break;
        }
        if HAS_STARTS && i >= K - 1u {
            if starts_at(batch, i - (K - 1u)) {
                for (var k = 0u; k < K; k = k + 1u) {
                    window[k] = 0.0;
                }
            }
        }
        for (var k = K - 1u; k > 0u; k = k - 1u) {
            window[k] = window[k - 1u];
        }
        window[0] = input_at(batch, e, i);
        if i >= first + (K - 1u) {
            let t = i - (K - 1u);
            var sum = bias;
            for (var k = 0u; k < K; k = k + 1u) {
                sum = fma(taps[k], window[k], sum);
            }
            if SILU {
                sum = silu(sum);
            }
            y_out[params.y.x + (batch * params.length + t) * params.y.y + e] = sum;
            if t == length - 1u {
                for (var k = 0u; k + 1u < K; k = k + 1u) {
                    let row = batch * (K - 1u) + ((K - 1u) - (k + 1u));
                    final_out[params.final_state.x + row * params.final_state.y + e] = window[k];
                }
            }
        }
    }
    if HAS_LENGTHS {
        for (var t = max(first, length); t < end; t = t + 1u) {
            y_out[params.y.x + (batch * params.length + t) * params.y.y + e] = 0.0;
        }
    }
}
