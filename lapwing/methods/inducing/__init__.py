"""Methods that describe the posterior by a few inducing points: VaLLA and ELLA.

Their points (anchors), the placement of these and the curvatures in their span live here and nowhere else.
"""
