"""The live page: HTML, style and ES modules (`main.js` first); `bundle.py` makes one document of them."""
