/* Forwards the three CBLAS products that MLX's CPU build calls to OpenBLAS under the prefixed names that the
   scipy-openblas32 package exports. Loaded with RTLD_GLOBAL after that library and before MLX, these definitions are
   found first and take the place of the reference BLAS that MLX brings along. No Python in here: loaded by ctypes.

   A product with one row, as in every layer while one sequence decodes, goes to the matrix-vector product: OpenBLAS's
   general one first copies the whole matrix into a layout that pays off for many rows. */

typedef int blasint;

extern void scipy_cblas_sgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, float alpha,
                              const float *a, blasint lda, const float *b, blasint ldb, float beta, float *c,
                              blasint ldc);
extern void scipy_cblas_dgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, double alpha,
                              const double *a, blasint lda, const double *b, blasint ldb, double beta, double *c,
                              blasint ldc);
extern void scipy_cblas_cgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, const void *alpha,
                              const void *a, blasint lda, const void *b, blasint ldb, const void *beta, void *c,
                              blasint ldc);

extern void scipy_cblas_sgemv(int order, int trans, blasint m, blasint n, float alpha, const float *a, blasint lda,
                              const float *x, blasint incx, float beta, float *y, blasint incy);

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

void cblas_sgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, float alpha, const float *a,
                 blasint lda, const float *b, blasint ldb, float beta, float *c, blasint ldc) {
    if (m == 1 && k > 0 && order == ROW_MAJOR && (transb == TRANS || transb == NO_TRANS)) {
        const blasint step = transa == NO_TRANS ? 1 : lda; /* between the numbers of the one row */
        if (transb == TRANS)
            scipy_cblas_sgemv(ROW_MAJOR, NO_TRANS, n, k, alpha, b, ldb, a, step, beta, c, 1);
        else
            scipy_cblas_sgemv(ROW_MAJOR, TRANS, k, n, alpha, b, ldb, a, step, beta, c, 1);
        return;
    }
    scipy_cblas_sgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_dgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, double alpha, const double *a,
                 blasint lda, const double *b, blasint ldb, double beta, double *c, blasint ldc) {
    scipy_cblas_dgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int transa, int transb, blasint m, blasint n, blasint k, const void *alpha, const void *a,
                 blasint lda, const void *b, blasint ldb, const void *beta, void *c, blasint ldc) {
    scipy_cblas_cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* These functions and no others of their names, whichever the loader has found first. */
extern __typeof__(cblas_sgemm) own_sgemm __attribute__((alias("cblas_sgemm"), visibility("hidden")));
extern __typeof__(cblas_dgemm) own_dgemm __attribute__((alias("cblas_dgemm"), visibility("hidden")));
extern __typeof__(cblas_cgemm) own_cgemm __attribute__((alias("cblas_cgemm"), visibility("hidden")));

extern int cortexmlx_rebind(void *const *functions);

/* Have an MLX that is loaded already call them. Returns how many of the three it calls from then on: all, or none. */
int cortexmlx_take_over(void) {
    void *const functions[] = {(void *)own_sgemm, (void *)own_dgemm, (void *)own_cgemm};
    return cortexmlx_rebind(functions);
}
