/* gpu/tests/graph.h - work of a rank captured in a CUDA graph and replayed. */
#ifndef DPG_TESTS_GRAPH_H
#define DPG_TESTS_GRAPH_H
#include "rank.h"

struct Graph {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;

    /* Captures the calls of enqueue() on a stream. */
    template <class F> void capture(cudaStream_t s, F enqueue) {
        CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
        enqueue();
        CUDA(cudaStreamEndCapture(s, &graph));
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
    }
    void launch(cudaStream_t s) { CUDA(cudaGraphLaunch(exec, s)); }
    void close() {
        if (!graph) return;
        CUDA(cudaGraphExecDestroy(exec));
        CUDA(cudaGraphDestroy(graph));
        graph = NULL;
    }
};

/* The calls of enqueue() on the rank's stream, captured and then run once. r.st says whether the
 * capture succeeded. */
template <class F> static void run_as_graph(Rank &r, F enqueue) {
    Graph g;
    g.capture(r.stream, enqueue);
    g.launch(r.stream);
    CUDA(cudaStreamSynchronize(r.stream));
    g.close();
}
#endif
