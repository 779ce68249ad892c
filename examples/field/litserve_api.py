"""A LitServe API as its documentation writes them: spaCy's English tokenizer."""

import litserve as ls


class Words(ls.LitAPI):
    def setup(self, device):
        import spacy

        self.nlp = spacy.blank("en")

    def decode_request(self, request):
        return request["text"]

    def predict(self, text):
        return [token.text for token in self.nlp(text)]

    def encode_response(self, output):
        return {"words": output}
