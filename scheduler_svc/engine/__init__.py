"""The live requests as tokens: which there are, what becomes of them, where they wait."""
