// What kernels/cpu.py calls: formulas, shapes and meanings stand there and in kernels/reference.py.
// Rows are contiguous and a given number of floats apart; an absent tensor is NULL. No result depends on the number of
// threads: each row is one thread's, and sums over rows go by a fixed number of parts.

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t I;
typedef const float *restrict In;
typedef float *restrict Out;

enum { SERIAL = 1 << 14 };  // so many numbers one thread is done with before others wake

// Rows have functions of their own: inside the parallel loops a compiler does not see that pointers are apart.

static inline void add(const float *x, const float *y, float *sum, I n) {
    for (I j = 0; j < n; j++) sum[j] = x[j] + y[j];
}

static inline void norm_row(In x, In gain, In bias, Out y, Out stats, I n, float eps, I center) {
    float mean = 0, square = 0;
    if (center) {
#pragma omp simd reduction(+ : mean)
        for (I j = 0; j < n; j++) mean += x[j];
        mean /= n;
    }
#pragma omp simd reduction(+ : square)
    for (I j = 0; j < n; j++) square += (x[j] - mean) * (x[j] - mean);
    const float rstd = 1 / sqrtf(square / n + eps);
    stats[0] = mean;
    stats[1] = rstd;
    if (bias)
        for (I j = 0; j < n; j++) y[j] = (x[j] - mean) * rstd * gain[j] + bias[j];
    else
        for (I j = 0; j < n; j++) y[j] = (x[j] - mean) * rstd * gain[j];
}

void norm_forward(In x, In residual, In gain, In bias, Out y, Out h, Out stats, I x_stride, I r_stride, I n_rows,
                  I n_cols, float eps, I center) {
#pragma omp parallel for if (n_rows * n_cols > SERIAL)
    for (I i = 0; i < n_rows; i++) {
        const float *row = x + i * x_stride;
        if (residual) {
            add(row, residual + i * r_stride, h + i * n_cols, n_cols);
            row = h + i * n_cols;
        }
        if (center)  // a constant for each norm: neither does the other's work
            norm_row(row, gain, bias, y + i * n_cols, stats + 2 * i, n_cols, eps, 1);
        else
            norm_row(row, gain, bias, y + i * n_cols, stats + 2 * i, n_cols, eps, 0);
    }
}

static inline void norm_row_backward(In dy, In x, In gain, Out dx, Out dw, I n, float mean, float rstd, I center) {
    float along = 0, sum = 0;  // dy * gain along the normalised row, and along ones
#pragma omp simd reduction(+ : along, sum)
    for (I j = 0; j < n; j++) {
        const float unit = (x[j] - mean) * rstd, g = dy[j] * gain[j];
        along += g * unit;
        sum += g;
        dw[j] += dy[j] * unit;
    }
    along /= n;
    sum = center ? sum / n : 0;
    for (I j = 0; j < n; j++) dx[j] = rstd * (dy[j] * gain[j] - (x[j] - mean) * rstd * along - sum);
}

// dw_parts and, where it is given, db_parts (n_parts, n_cols) hold nothing yet.
void norm_backward(In dy, In dh, In h, In gain, In stats, Out dx, Out dw_parts, Out db_parts, I dy_stride,
                   I dh_stride, I h_stride, I n_rows, I n_cols, I n_parts, I center) {
    const I part_rows = (n_rows + n_parts - 1) / n_parts;
#pragma omp parallel for if (n_rows * n_cols > SERIAL)
    for (I part = 0; part < n_parts; part++) {
        float *dw = dw_parts + part * n_cols, *db = db_parts ? db_parts + part * n_cols : NULL;
        memset(dw, 0, n_cols * sizeof(float));
        if (db) memset(db, 0, n_cols * sizeof(float));
        const I end = (part + 1) * part_rows < n_rows ? (part + 1) * part_rows : n_rows;
        for (I i = part * part_rows; i < end; i++) {
            const float *d = dy + i * dy_stride;
            float *out = dx + i * n_cols;
            const float mean = stats[2 * i], rstd = stats[2 * i + 1];
            if (center)
                norm_row_backward(d, h + i * h_stride, gain, out, dw, n_cols, mean, rstd, 1);
            else
                norm_row_backward(d, h + i * h_stride, gain, out, dw, n_cols, 0, rstd, 0);
            if (db) add(db, d, db, n_cols);
            if (dh) add(out, dh + i * dh_stride, out, n_cols);
        }
    }
}

// e^x to 2 units in the last place: 2^n times a polynomial on |r| <= ln(2)/2 (Cephes, expf)
static inline float fast_exp(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 89.0f ? 89.0f : x;  // infinity
    const float n = rintf(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    union { int32_t bits; float value; } scale = {.bits = ((int32_t)n + 127) << 23};
    return p * scale.value;
}

static inline void swiglu_row(In g, In u, Out y, I n_cols) {
    for (I j = 0; j < n_cols; j++) y[j] = g[j] / (1 + fast_exp(-g[j])) * u[j];
}

static inline void swiglu_row_backward(In dy, In g, In u, Out dg, Out du, I n_cols) {
    for (I j = 0; j < n_cols; j++) {
        const float sigmoid = 1 / (1 + fast_exp(-g[j]));
        dg[j] = dy[j] * u[j] * sigmoid * (1 + g[j] * (1 - sigmoid));
        du[j] = dy[j] * g[j] * sigmoid;
    }
}

void swiglu_forward(In gate, In up, Out y, I gate_stride, I up_stride, I n_rows, I n_cols) {
#pragma omp parallel for if (n_rows * n_cols > SERIAL)
    for (I i = 0; i < n_rows; i++) swiglu_row(gate + i * gate_stride, up + i * up_stride, y + i * n_cols, n_cols);
}

void swiglu_backward(In dy, In gate, In up, Out dgate, Out dup, I dy_stride, I gate_stride, I up_stride, I n_rows,
                     I n_cols) {
#pragma omp parallel for if (n_rows * n_cols > SERIAL)
    for (I i = 0; i < n_rows; i++)
        swiglu_row_backward(dy + i * dy_stride, gate + i * gate_stride, up + i * up_stride, dgate + i * n_cols,
                            dup + i * n_cols, n_cols);
}

// One of q and k, (B, H, T, D) of any strides but the last's, into out (B, T, H, D); turned back where sign is -1.
void rope(In x, In cos, In sin, Out out, I b_stride, I h_stride, I t_stride, I n_batch, I n_head, I n_time, I width,
          I half, float sign) {
#pragma omp parallel for collapse(2) if (n_batch * n_time * n_head * width > SERIAL)
    for (I b = 0; b < n_batch; b++)
        for (I t = 0; t < n_time; t++) {
            In c = cos + t * half, s = sin + t * half;
            for (I head = 0; head < n_head; head++) {
                In row = x + b * b_stride + head * h_stride + t * t_stride;
                Out to = out + ((b * n_time + t) * n_head + head) * width;
#pragma omp simd
                for (I j = 0; j < half; j++) {
                    to[j] = row[j] * c[j] - sign * row[j + half] * s[j];
                    to[j + half] = row[j + half] * c[j] + sign * row[j] * s[j];
                }
                for (I j = 2 * half; j < width; j++) to[j] = row[j];
            }
        }
}
