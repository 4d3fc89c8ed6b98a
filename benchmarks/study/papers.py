"""The papers whose claims docs/paper-claims.md tests: arXiv numbers and short titles."""

TETRAJET, MXFP4, DGE, SPACE = "2502.20853", "2502.20586", "2501.17116", "2509.17791"
NVFP4, FOUR_OVER_SIX, QUARTET = "2509.25149", "2512.02010", "2601.22813"
AVERIS, CHON = "2603.10444", "2602.02047"
# In the order of the table.
PAPERS = {
    TETRAJET: "TetraJet",
    MXFP4: "Training LLMs with MXFP4",
    DGE: "Optimizing LLM Training Using FP4",
    SPACE: "Elucidating the Design Space",
    NVFP4: "NVFP4",
    FOUR_OVER_SIX: "Four Over Six",
    QUARTET: "Quartet II",
    AVERIS: "Averis",
    CHON: "Dissecting Outlier Dynamics",
}
