// cuRAND on the software driver: candle makes a generator with every device. Nothing draws numbers from it.

extern "C" {

int curandCreateGenerator(void** generator, int) {
    *generator = new int;
    return 0;
}

int curandDestroyGenerator(void* generator) {
    delete static_cast<int*>(generator);
    return 0;
}

int curandSetStream(void*, void*) { return 0; }

int curandSetPseudoRandomGeneratorSeed(void*, unsigned long long) { return 0; }

}  // extern "C"
