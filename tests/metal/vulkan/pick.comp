#version 450
// Copies count words of two buffers, each from a place of its own, into a third, alternately.
layout(local_size_x = 64) in;
layout(binding = 0) readonly buffer A { uint a[]; };
layout(binding = 1) readonly buffer B { uint b[]; };
layout(binding = 2) writeonly buffer C { uint c[]; };
layout(push_constant) uniform P { uint a_first, b_first, count; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i < count) {
        c[2 * i] = a[a_first + i];
        c[2 * i + 1] = b[b_first + i];
    }
}
