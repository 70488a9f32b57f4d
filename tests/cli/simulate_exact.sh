"$KOILA" simulate easy.pickle --check
